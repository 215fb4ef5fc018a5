"""Checksums of transfers, made and compared on threads of their own: neither the event loop nor the fabric's progress
thread waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baton_fabric.engine import FabricEngine, Stream
from baton_kv.checksum import Runs, destination_runs, source_runs, unit_bytes
from baton_kv.streams import PageGrid, StreamPlan

from .session import SessionView

# One saturates half of the memory's bandwidth (10 GB/s); more would only take it from the models.
THREADS = 2
MODULUS = 1 << 64

# A region of the engine, the salt, and what of the region is summed.
Part = tuple[int, int, Runs]


class Checksums:
    """Belongs to the agent; used by its sender and its receiver."""

    def __init__(self, engine: FabricEngine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="checksum")

    def check_readable(self, regions: Sequence[int]) -> None:
        """Raises FabricError(CHECKSUM_UNSUPPORTED) if one of them is memory of a GPU."""
        nothing = np.empty((0, 3), np.uint64)
        for region in regions:
            self._engine.checksum(region, nothing, 1, 0)

    async def of_source(
        self, view: SessionView, streams: Sequence[Stream], pages: tuple[Sequence[int], Sequence[int]]
    ) -> int:
        """What a transfer reads. Raises FabricError."""

        def parts() -> list[Part]:
            return [(each.source_region, each.remotes[0].key, source_runs(_plan(each), *pages)) for each in streams]

        return await self._run(parts, unit_bytes(view.cache.layout))

    def destination(self, view: SessionView, dp_rank: int, pages: Sequence[int], tokens: int) -> list[Part]:
        """What a transfer to `dp_rank` writes: the first `tokens` positions of `pages`. Raises InvalidKvArgument."""
        shards, layout = view.cache.shards, view.cache.layout
        parts: list[Part] = []
        for number in sorted(rank for ranks in shards.replica_sets(dp_rank) for rank in ranks):
            rank = view.ranks[number]
            found = destination_runs(shards.layout_of(number, layout), rank.region_map, pages, tokens)
            for memory, runs in zip(rank.memories, found, strict=True):
                parts.append((memory.registered.region, memory.registered.accesses[0].key, runs))
        return parts

    async def of_destination(self, view: SessionView, parts: list[Part]) -> int:
        """Raises FabricError."""
        return await self._run(lambda: parts, unit_bytes(view.cache.layout))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, parts: Callable[[], list[Part]], unit: int) -> int:
        def total() -> int:
            return sum(self._engine.checksum(region, runs, unit, salt) for region, salt, runs in parts()) % MODULUS

        return await asyncio.get_running_loop().run_in_executor(self._threads, total)


def _plan(stream: Stream) -> StreamPlan:
    """The stream in the terms of baton_kv; which ranks it connects is of no importance here."""
    place = stream.placement
    assert place is not None, "the agent places every stream"
    return StreamPlan(
        0,
        0,
        0,
        0,
        place.first_layer,
        place.layers,
        PageGrid(stream.source_layer_stride, stream.source_page_stride, place.source_parts, place.source_part_stride),
        PageGrid(stream.remote_layer_stride, stream.remote_page_stride, place.remote_parts, place.remote_part_stride),
        tuple(stream.extents),
    )
