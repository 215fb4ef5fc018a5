"""Pages of a benchmark: where they lie on both sides, as a transfer's lists and as the writes of a bare loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

LAYERS = 4


@dataclass(frozen=True)
class Pages:
    """`LAYERS` layers of pages of one size, both sides a pool of `pool_pages` pages a layer."""

    page_bytes: int
    run: int
    pool_pages: int
    source: list[int]
    destination: list[int]

    @property
    def layer_bytes(self) -> int:
        return self.pool_pages * self.page_bytes

    @property
    def bytes(self) -> int:
        return LAYERS * len(self.source) * self.page_bytes

    @property
    def extents(self) -> int:
        return LAYERS * len(self.source)

    def writes(self) -> list[tuple[int, int]]:
        """Offsets of each run, in the order in which a transfer sends them."""
        return [
            (layer * self.layer_bytes + source * self.page_bytes, layer * self.layer_bytes + to * self.page_bytes)
            for layer in range(LAYERS)
            for source, to in zip(self.source[:: self.run], self.destination[:: self.run], strict=True)
        ]


def scattered(page_bytes: int, total_bytes: int, pool_bytes: int, *, run: int = 1, seed: int = 0) -> Pages:
    """About `total_bytes` in pages at random places, or in runs of `run` neighbours at random places. The pages of both
    sides are drawn apart from each other; no run has another as its neighbour on both sides."""
    pool_pages = pool_bytes // LAYERS // page_bytes
    runs = min(total_bytes // LAYERS // page_bytes, pool_pages) // run
    chance = random.Random(seed)
    sides = [list(_runs(chance.sample(range(pool_pages // run), runs), run)) for _ in range(2)]
    return Pages(page_bytes, run, pool_pages, *sides)


def _runs(starts: list[int], run: int) -> Iterator[int]:
    for start in starts:
        yield from range(start * run, (start + 1) * run)
