"""Attention on a CPU: pages are gathered by row copies, then torch's fused kernel attends.

Chunks of prompts go one sequence after the other, in tiles of queries. Decodes of similar length go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..batch import ForwardBatch
from ..cache import KvCache
from ..errors import InvalidBatch
from .base import AttentionBackend, AttentionStep

# Queries of a chunk that attend together. Keys after a tile's last query are never looked at, so smaller tiles skip
# more of the triangle, and larger ones run faster.
QUERY_TILE = 128

# Tokens of padding that cost as much as one more call of the kernel: a call with its gather takes about 30 us beyond
# its work, a padded token 0.13 us (one core, head_dim 64, 3 KV heads, float32).
PADDING_ALLOWANCE = 256


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries `[start, stop)` of a chunk, which see `keys` tokens."""

    start: int
    stop: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several new tokens: rows `[start, stop)` of the batch."""

    start: int
    stop: int
    pages: torch.Tensor
    tiles: list[_Tile]

    def attend(self, layer: int, cache: KvCache, queries: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = cache.gather(layer, self.pages, 1)
        heads = queries[self.start : self.stop].transpose(0, 1)[None]
        result = out[self.start : self.stop]
        for tile in self.tiles:
            attended = F.scaled_dot_product_attention(
                heads[:, :, tile.start : tile.stop],
                keys[:, :, : tile.keys],
                values[:, :, : tile.keys],
                attn_mask=tile.mask,
                enable_gqa=True,
            )
            result[tile.start : tile.stop] = attended[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one new token each, at `rows` of the batch, padded to the longest's `keys` tokens."""

    rows: slice | torch.Tensor
    count: int
    pages: torch.Tensor
    keys: int
    mask: torch.Tensor | None

    def attend(self, layer: int, cache: KvCache, queries: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = cache.gather(layer, self.pages, self.count)
        # The query heads that share a KV head are as good as so many queries of that head.
        grouped = queries[self.rows].view(self.count, cache.kv_heads, -1, cache.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys[:, :, : self.keys], values[:, :, : self.keys], attn_mask=self.mask
        )
        out[self.rows] = attended.flatten(1, 2)


class CpuAttentionStep(AttentionStep):
    """See `AttentionStep`. Holds the row indices and masks of one batch."""

    def __init__(
        self,
        cache: KvCache,
        new_rows: torch.Tensor,
        begun_pages: torch.Tensor | None,
        parts: Sequence[_Chunk | _Decodes],
    ) -> None:
        self._cache = cache
        self._new_rows = new_rows
        self._begun_pages = begun_pages
        self._parts = parts

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        if self._begun_pages is not None:
            self._cache.clear(layer, self._begun_pages)
        self._cache.write(layer, self._new_rows, entries)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        for part in self._parts:
            part.attend(layer, self._cache, queries, out)
        return out.flatten(1)


class CpuAttention(AttentionBackend):
    """Attention through `scaled_dot_product_attention`, for float32 and bfloat16."""

    def plan(self, batch: ForwardBatch, cache: KvCache) -> CpuAttentionStep:
        """See `AttentionBackend.plan`."""
        tables = [batch.table(i, -(-length // cache.page_size)) for i, length in enumerate(batch.context_lens)]
        _check_pages(tables, cache)
        starts = [0]
        for length in batch.query_lens:
            starts.append(starts[-1] + length)
        decodes = [i for i, length in enumerate(batch.query_lens) if length == 1]
        parts: list[_Chunk | _Decodes] = [
            _plan_chunk(start, query, context, table, cache)
            for start, query, context, table in zip(starts, batch.query_lens, batch.context_lens, tables, strict=False)
            if query > 1
        ]
        for group in group_by_length([batch.context_lens[i] for i in decodes], PADDING_ALLOWANCE):
            members = sorted(decodes[i] for i in group)
            parts.append(
                _plan_decodes(
                    [starts[i] for i in members],
                    [batch.context_lens[i] for i in members],
                    [tables[i] for i in members],
                    cache,
                )
            )
        begun = _begun_pages(batch, tables, cache.page_size)
        return CpuAttentionStep(
            cache, _new_rows(batch, tables, cache), cache.page_rows([begun]) if begun else None, parts
        )


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


def _check_pages(tables: Sequence[Sequence[int]], cache: KvCache) -> None:
    for sequence, table in enumerate(tables):
        for page in (min(table), max(table)):
            if not 0 <= page < cache.pages:
                raise InvalidBatch(
                    f"sequence {sequence} names page {page}; the cache has pages 0 to {cache.pages - 1}",
                    sequence=sequence,
                    page=page,
                )


def _new_rows(batch: ForwardBatch, tables: Sequence[Sequence[int]], cache: KvCache) -> torch.Tensor:
    """Rows of the cache that this batch's tokens go to."""
    places = [
        (table[token // cache.page_size], token % cache.page_size)
        for query, context, table in zip(batch.query_lens, batch.context_lens, tables, strict=True)
        for token in range(context - query, context)
    ]
    pages, offsets = torch.tensor(places, dtype=torch.int64).unbind(1)
    return cache.token_rows(pages, offsets)


def _begun_pages(batch: ForwardBatch, tables: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """Pages whose first token this batch writes, and whose last it doesn't.

    They are cleared first. What an earlier owner left there would otherwise travel with the page to other workers, and
    a masked score or value that is not a number still spoils a sum.
    """
    return [
        table[-1]
        for query, context, table in zip(batch.query_lens, batch.context_lens, tables, strict=True)
        if 0 < context % page_size <= query
    ]


def _plan_chunk(start: int, query: int, context: int, table: Sequence[int], cache: KvCache) -> _Chunk:
    tiles = []
    for first in range(0, query, QUERY_TILE):
        stop = min(first + QUERY_TILE, query)
        keys = context - query + stop
        mask = None
        if stop - first > 1:
            allowed = torch.ones(stop - first, keys, dtype=torch.bool).tril(keys - (stop - first))
            mask = torch.zeros(allowed.shape, dtype=cache.dtype).masked_fill_(~allowed, float("-inf"))
        tiles.append(_Tile(first, stop, keys, mask))
    return _Chunk(start, start + query, cache.page_rows([table]), tiles)


def _plan_decodes(
    rows: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], cache: KvCache
) -> _Decodes:
    keys, width = max(contexts), max(len(table) for table in tables)
    mask = None
    if min(contexts) < keys:
        beyond = torch.arange(keys)[None, :] >= torch.tensor(contexts)[:, None]
        mask = torch.zeros(beyond.shape, dtype=cache.dtype).masked_fill_(beyond, float("-inf"))[:, None, None, :]
    # A sequence is padded with a page of its own: no other page is sure to lie still.
    padded = [[*table, *[table[0]] * (width - len(table))] for table in tables]
    # Neighbours in the batch need no copy of their queries.
    adjacent = list(rows) == list(range(rows[0], rows[0] + len(rows)))
    place = slice(rows[0], rows[0] + len(rows)) if adjacent else torch.tensor(rows)
    return _Decodes(place, len(rows), cache.page_rows(padded), keys, mask)
