"""A session: one worker's engine, from its first rank's hand-off until its memory is unmapped. Pure but for its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.v1 import agent_pb2, common_pb2

from baton_kv.layout import PageLayout
from baton_kv.regions import RegionMap
from baton_memory.offer import Handoff

from .devices import RegionMemory
from .errors import InvalidArgument, SessionConflict
from .event_log import EventLog
from .wire import Cache, cache_of


@dataclass(frozen=True)
class Rank:
    """One rank's memory, registered with the fabric. `counter` is the engine's id."""

    connection: int
    memories: tuple[RegionMemory, ...]
    # Which of them holds which layers.
    region_map: RegionMap
    counter: int

    @property
    def length(self) -> int:
        return sum(memory.length for memory in self.memories)


@dataclass(frozen=True)
class SessionView:
    """A ready session, as those who open inboxes and transfers see it. Never changes."""

    session: int
    cache: Cache
    ranks: tuple[Rank, ...]
    events: EventLog

    @property
    def regions(self) -> list[common_pb2.RegionDescriptor]:
        descriptors: list[common_pb2.RegionDescriptor] = []
        for number, rank in enumerate(self.ranks):
            for run in rank.region_map.runs:
                memory = rank.memories[run.region]
                descriptors.append(
                    common_pb2.RegionDescriptor(
                        rank=number,
                        length=memory.length,
                        accesses=[
                            common_pb2.RegionAccess(domain=access.domain, key=access.key, base=access.base)
                            for access in memory.registered.accesses
                        ],
                        first_layer=run.first_layer,
                        layers=run.layers,
                    )
                )
        return descriptors

    def ranks_of(self, dp_rank: int) -> tuple[Rank, ...]:
        """The ranks of a data-parallel rank, the first of which counts its layers. Raises InvalidArgument."""
        shards = self.cache.shards
        if not 0 <= dp_rank < shards.dp:
            raise InvalidArgument(
                f"data-parallel rank {dp_rank} must be below {shards.dp}, as many as the session has",
                field="data_parallel_rank",
            )
        return self.ranks[dp_rank * shards.tp : (dp_rank + 1) * shards.tp]

    def region_ids(self, dp_rank: int) -> list[int]:
        """The engine's ids of a data-parallel rank's regions. Raises InvalidArgument."""
        return [memory.registered.region for rank in self.ranks_of(dp_rank) for memory in rank.memories]

    def domains(self, dp_rank: int) -> tuple[int, ...]:
        """Numbers of the domains that serve the memory of a data-parallel rank. Raises InvalidArgument."""
        memories = (memory for rank in self.ranks_of(dp_rank) for memory in rank.memories)
        return tuple(sorted({access.domain for memory in memories for access in memory.registered.accesses}))


def cache_of_offer(offer: Handoff) -> Cache:
    """The worker's whole cache, from one rank's offer. Raises SessionConflict if the rank's heads aren't its share."""
    numbers: Mapping[str, Any] = offer.layout
    layout = PageLayout(
        numbers["order"],
        numbers["layers"],
        numbers["pages"],
        numbers["page_size"],
        numbers["kv_heads"],
        numbers["head_dim"],
        numbers["element_size"],
    )
    cache = cache_of(
        layout,
        numbers["kv_heads_total"],
        offer.ranks // offer.data_parallel,
        offer.data_parallel,
        numbers["dtype"],
    )
    share = len(cache.shards.heads_of(offer.rank))
    if numbers["kv_heads"] != share:
        raise SessionConflict(
            f"rank {offer.rank} has {numbers['kv_heads']} KV heads, its share of {cache.shards.heads} is {share}",
            rank=offer.rank,
        )
    return cache


class Session:
    """Collects the ranks."""

    def __init__(self, session: int, cache: Cache, events: EventLog) -> None:
        self.session = session
        self.cache = cache
        self.events = events
        self.ranks: dict[int, Rank] = {}
        self.ending = False

    def check(self, offer: Handoff, cache: Cache) -> None:
        """Raises SessionConflict if a rank with this offer may not join."""
        if self.ending:
            raise SessionConflict(f"session {self.session:#x} is ending: draw a new id", session=self.session)
        if offer.rank in self.ranks:
            raise SessionConflict(
                f"rank {offer.rank} of session {self.session:#x} has handed its memory over before", rank=offer.rank
            )
        if cache != self.cache:
            raise SessionConflict(
                f"rank {offer.rank} describes another cache than the session's other ranks: {cache}, not {self.cache}",
                rank=offer.rank,
            )

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.cache.shards.ranks

    def view(self) -> SessionView:
        return SessionView(
            self.session, self.cache, tuple(self.ranks[rank] for rank in range(len(self.ranks))), self.events
        )


def ready_event(view: SessionView) -> agent_pb2.SessionReady:
    return agent_pb2.SessionReady(regions=view.regions)
