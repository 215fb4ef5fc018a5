"""A write plan in the terms of the fabric: which bytes of which local region go where in which remote one. Pure."""

from __future__ import annotations

from baton_fabric.engine import Placement, Stream
from baton_kv.plan import plan_pairs
from baton_kv.streams import StreamPlan
from baton_kv.streams import plan_streams as plan

from .session import SessionView
from .wire import RemoteInbox


def plan_streams(ours: SessionView, dp_rank: int, inbox: RemoteInbox, seed: int) -> list[Stream]:
    """Who writes what into which region, from our data-parallel rank `dp_rank`. Raises baton_kv's LayoutMismatch."""
    pairs = plan_pairs(
        ours.cache.shards,
        inbox.cache.shards,
        ours.cache.layout,
        inbox.cache.layout,
        inbox.data_parallel_rank,
        seed,
        dp_rank,
    )
    plans = plan(pairs, [rank.region_map for rank in ours.ranks], [rank.region_map for rank in inbox.ranks])
    return [_stream(each, ours, inbox) for each in plans]


def _stream(plan: StreamPlan, ours: SessionView, inbox: RemoteInbox) -> Stream:
    remote = inbox.ranks[plan.destination_rank].regions[plan.destination_region]
    return Stream(
        source_region=ours.ranks[plan.source_rank].memories[plan.source_region].registered.region,
        source_layer_stride=plan.source.layer_stride,
        source_page_stride=plan.source.page_stride,
        remotes=remote.accesses,
        remote_length=remote.length,
        remote_layer_stride=plan.destination.layer_stride,
        remote_page_stride=plan.destination.page_stride,
        extents=plan.extents,
        placement=Placement(
            plan.first_layer,
            plan.layers,
            plan.source.parts,
            plan.source.part_stride,
            plan.destination.parts,
            plan.destination.part_stride,
        ),
    )
