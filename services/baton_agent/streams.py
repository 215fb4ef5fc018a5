"""A write plan in the terms of the fabric: which bytes of which local region go where in which remote one. Pure."""

from __future__ import annotations

from baton_fabric.engine import Stream
from baton_kv.plan import plan_pairs

from .session import SessionView
from .wire import RemoteInbox


def plan_streams(ours: SessionView, inbox: RemoteInbox, seed: int) -> list[Stream]:
    """Who writes what into which region. Raises baton_kv's LayoutMismatch."""
    pairs = plan_pairs(
        ours.cache.shards,
        inbox.cache.shards,
        ours.cache.layout,
        inbox.cache.layout,
        inbox.data_parallel_rank,
        seed,
    )
    streams: list[Stream] = []
    for pair in pairs:
        remote = inbox.regions[pair.destination_rank]
        streams.append(
            Stream(
                source_region=ours.ranks[pair.source_rank].region,
                source_layer_stride=pair.source.layer_bytes,
                source_page_stride=pair.source.page_bytes,
                remote_key=remote.key,
                remote_base=remote.base,
                remote_length=remote.length,
                remote_layer_stride=pair.destination.layer_bytes,
                remote_page_stride=pair.destination.page_bytes,
                extents=pair.extents,
            )
        )
    return streams
