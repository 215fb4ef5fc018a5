"""Which rows of a paged latent cache a batch touches, and which of its tokens attend together.

Chunks of prompts go one sequence after the other, in tiles of queries. Decodes of similar length go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import ForwardBatch
from ..cache import PagedCache
from .pages import begun_pages, page_tables

# Queries of a chunk that attend together. Keys after a tile's last query are never looked at, so smaller tiles skip
# more of the triangle, and larger ones run faster.
QUERY_TILE = 128

# Tokens of padding that cost as much as one more round of products. In float32 a round costs 14 to 44 us beyond its
# work and a padded token 0.2 to 0.6 us, in bfloat16 140 to 210 us and 0.1 to 0.2 us (one core, 4 and 16 heads).
PADDING_ALLOWANCE = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `[start, stop)` of a chunk, which see `keys` tokens. `mask`: `[stop - start, keys]`, added to scores."""

    start: int
    stop: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several new tokens: rows `[start, stop)` of the batch. `pages`: rows of the cache."""

    start: int
    stop: int
    pages: torch.Tensor
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one new token each, at `rows` of the batch, padded to the longest's `keys` tokens. `contexts`: the
    tokens of each.

    `pages`: rows of the cache; `mask`: `[count, 1, keys]`, added to scores.
    """

    rows: slice | torch.Tensor
    count: int
    contexts: Sequence[int]
    pages: torch.Tensor
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagePlan:
    """A batch over one cache. `new_rows`: where its tokens' entries go; `begun_pages`: what is cleared before."""

    new_rows: torch.Tensor
    begun_pages: torch.Tensor | None
    chunks: list[Chunk]
    decodes: list[Decodes]

    def store(self, cache: PagedCache, layer: int, entries: torch.Tensor) -> None:
        """Writes the new entries of a layer, in the shape that the cache's `write` takes."""
        if self.begun_pages is not None:
            cache.clear(layer, self.begun_pages)
        cache.write(layer, self.new_rows, entries)


def plan_pages(batch: ForwardBatch, cache: PagedCache) -> PagePlan:
    """Raises `InvalidBatch` where pages are missing or out of range."""
    tables = page_tables(batch, cache.page_size, cache.pages)
    starts = [0]
    for length in batch.query_lens:
        starts.append(starts[-1] + length)
    chunks = [
        _plan_chunk(start, query, context, table, cache)
        for start, query, context, table in zip(starts, batch.query_lens, batch.context_lens, tables, strict=False)
        if query > 1
    ]
    singles = [i for i, length in enumerate(batch.query_lens) if length == 1]
    decodes = []
    for group in group_by_length([batch.context_lens[i] for i in singles], PADDING_ALLOWANCE):
        members = sorted(singles[i] for i in group)
        decodes.append(
            _plan_decodes(
                [starts[i] for i in members],
                [batch.context_lens[i] for i in members],
                [tables[i] for i in members],
                cache,
            )
        )
    begun = begun_pages(batch, tables, cache.page_size)
    return PagePlan(_new_rows(batch, tables, cache), cache.page_rows([begun]) if begun else None, chunks, decodes)


def group_by_length(lengths: Sequence[int], allowance: int) -> list[list[int]]:
    """Splits indices into groups of similar length, so that padding a group to its longest adds at most `allowance`."""
    groups: list[list[int]] = []
    padding = longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += longest - lengths[index]
        if groups and padding <= allowance:
            groups[-1].append(index)
        else:
            groups.append([index])
            padding, longest = 0, lengths[index]
    return groups


def _new_rows(batch: ForwardBatch, tables: Sequence[Sequence[int]], cache: PagedCache) -> torch.Tensor:
    """Rows of the cache that this batch's tokens go to."""
    places = [
        (table[token // cache.page_size], token % cache.page_size)
        for query, context, table in zip(batch.query_lens, batch.context_lens, tables, strict=True)
        for token in range(context - query, context)
    ]
    pages, offsets = torch.tensor(places, dtype=torch.int64).unbind(1)
    return cache.token_rows(pages, offsets)


def _plan_chunk(start: int, query: int, context: int, table: Sequence[int], cache: PagedCache) -> Chunk:
    tiles = []
    for first in range(0, query, QUERY_TILE):
        stop = min(first + QUERY_TILE, query)
        keys = context - query + stop
        mask = None
        if stop - first > 1:
            allowed = torch.ones(stop - first, keys, dtype=torch.bool).tril(keys - (stop - first))
            mask = torch.zeros(allowed.shape, dtype=cache.dtype).masked_fill_(~allowed, float("-inf"))
        tiles.append(Tile(first, stop, keys, mask))
    return Chunk(start, start + query, cache.page_rows([table]), tiles)


def _plan_decodes(
    rows: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], cache: PagedCache
) -> Decodes:
    keys, width = max(contexts), max(len(table) for table in tables)
    mask = None
    if min(contexts) < keys:
        beyond = torch.arange(keys)[None, :] >= torch.tensor(contexts)[:, None]
        mask = torch.zeros(beyond.shape, dtype=cache.dtype).masked_fill_(beyond, float("-inf"))[:, None, :]
    # A sequence is padded with a page of its own: no other page is sure to lie still.
    padded = [[*table, *[table[0]] * (width - len(table))] for table in tables]
    # Neighbours in the batch need no copy of their queries.
    adjacent = list(rows) == list(range(rows[0], rows[0] + len(rows)))
    place = slice(rows[0], rows[0] + len(rows)) if adjacent else torch.tensor(rows)
    return Decodes(place, len(rows), contexts, cache.page_rows(padded), keys, mask)
