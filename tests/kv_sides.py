"""Caches of whole workers, written token by token: what the copies of a write plan are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from baton_kv.layout import Order, PageLayout
from baton_kv.regions import RegionMap
from baton_kv.shards import ShardMap

DIM = 2

# (bytes of a region) -> writable zeros.
Allocate = Callable[[int], memoryview | bytearray]


def tokens_of(layers: int, tokens: int, heads: int) -> np.ndarray:
    """An unsharded cache by token: uint16 [layers, tokens, 2, heads, DIM], all different and none 0. A latent cache
    takes [.., 0, 0, :] of one head."""
    count = layers * tokens * 2 * heads * DIM
    assert count < 1 << 16
    return np.arange(1, count + 1, dtype=np.uint16).reshape(layers, tokens, 2, heads, DIM)


class Side:
    """One worker's ranks, each with its cache over regions of its own, and the pages of one request.

    `splits`: layers of each region. `regions`: of each rank, uint16 [layers of the region, pages, *page].
    """

    def __init__(
        self,
        layout: PageLayout,
        shards: ShardMap,
        pages: Sequence[int],
        splits: Sequence[int],
        allocate: Allocate = bytearray,
    ) -> None:
        self.layout, self.shards, self.pages, self.splits = layout, shards, list(pages), list(splits)
        self.map = RegionMap.split(splits)
        self.regions: list[list[np.ndarray]] = []
        for rank in range(shards.ranks):
            own = self.rank_layout(rank)
            buffers = [allocate(layers * own.layer_bytes) for layers in splits]
            self.regions.append(
                [
                    np.frombuffer(buffer, dtype=np.uint16).reshape(layers, *own.shape[1:])
                    for layers, buffer in zip(splits, buffers, strict=True)
                ]
            )

    def rank_layout(self, rank: int) -> PageLayout:
        return self.shards.layout_of(rank, self.layout)

    def holds_the_same(self, other: Side) -> bool:
        """Whether every byte of every region is equal; regions may be cut differently."""
        return all(
            (np.concatenate(ours) == np.concatenate(theirs)).all()
            for ours, theirs in zip(self.regions, other.regions, strict=True)
        )

    def compute(self, values: np.ndarray, dp_rank: int, first: int, end: int, skipped_pages: int = 0) -> None:
        """What the ranks of `dp_rank` write when they compute tokens [first, end): `values` as `tokens_of` gives them.

        `skipped_pages`: pages of the prompt that `pages` leaves out.
        """
        for rank in range(dp_rank * self.shards.tp, (dp_rank + 1) * self.shards.tp):
            heads = list(self.shards.heads_of(rank))
            layers = [layer for region in self.regions[rank] for layer in region]
            for layer, own in zip(layers, values, strict=True):
                for token in range(first, end):
                    page = layer[self.pages[token // self.layout.page_size - skipped_pages]]
                    _write_token(page, self.layout.order, token % self.layout.page_size, own[token], heads)


def _write_token(page: np.ndarray, order: Order, place: int, values: np.ndarray, heads: list[int]) -> None:
    if order == "HND":
        page[:, :, place] = values[:, heads]
    elif order == "NHD":
        page[:, place] = values[:, heads]
    else:
        page[place] = values[0, 0]
