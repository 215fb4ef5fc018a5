"""A forward pass over pages in the terms of GPU kernels: compressed rows, as FlashInfer takes them. Pure.

Sequence i has rows `query_indptr[i]` to `query_indptr[i + 1]` of the batch and the pages
`page_indices[page_indptr[i] : page_indptr[i + 1]]`, the last of which holds `last_page_lens[i]` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ..batch import ForwardBatch
from .pages import begun_pages, page_tables


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """B sequences with N new tokens; int32 tensors on the CPU, `slots` int64.

    * `query_indptr [B + 1]`, `page_indptr [B + 1]`, `page_indices [page_indptr[B]]`, `last_page_lens [B]` in
      [1, page_size]: see the module. `context_lens [B]` says the same as the last two.
    * `rows [N]`: the sequence that each new token belongs to; `positions [N]`: its place in it; `slots [N]`: its place
      in the cache, `page * page_size + offset`.
    * `begun`: pages to be cleared before anything is written.
    * `decode`: every sequence has one new token.
    """

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_lens: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    begun: tuple[int, ...]
    decode: bool


def plan_pages(batch: ForwardBatch, page_size: int, pages: int) -> PagedPlan:
    """Raises `InvalidBatch` where pages are missing or outside a cache of `pages` pages."""
    tables = page_tables(batch, page_size, pages)
    queries = np.asarray(batch.query_lens, dtype=np.int32)
    contexts = np.asarray(batch.context_lens, dtype=np.int32)
    counts = np.asarray([len(table) for table in tables], dtype=np.int32)
    query_indptr, page_indptr = _indptr(queries), _indptr(counts)
    rows = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    # New tokens are the last of their sequence.
    first = contexts - queries - query_indptr[:-1]
    positions = np.arange(query_indptr[-1], dtype=np.int32) + first[rows]
    page_indices = np.fromiter(chain(*tables), dtype=np.int32, count=int(page_indptr[-1]))
    slots = page_indices[page_indptr[rows] + positions // page_size].astype(np.int64) * page_size
    return PagedPlan(
        query_indptr=torch.from_numpy(query_indptr),
        page_indptr=torch.from_numpy(page_indptr),
        page_indices=torch.from_numpy(page_indices),
        last_page_lens=torch.from_numpy((contexts - 1) % np.int32(page_size) + np.int32(1)),
        context_lens=torch.from_numpy(contexts),
        rows=torch.from_numpy(rows),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots + positions % page_size),
        begun=tuple(begun_pages(batch, tables, page_size)),
        decode=bool((queries == 1).all()),
    )


def padded(batch: ForwardBatch, size: int) -> ForwardBatch:
    """A batch of decodes with at least one sequence, filled up to `size` sequences by repeating its shortest.

    A repeated row computes what the row itself does, and stores the same entries at the same place: so no page has to
    be set aside for padding to write to.
    """
    missing = size - len(batch.query_lens)
    if missing == 0:
        return batch
    shortest = min(range(len(batch.context_lens)), key=lambda i: batch.context_lens[i])
    order = [*range(len(batch.query_lens)), *[shortest] * missing]
    return ForwardBatch(
        token_ids=batch.token_ids[order],
        positions=batch.positions[order],
        query_lens=[1] * size,
        context_lens=_pick(batch.context_lens, order),
        page_tables=[batch.table(i, len(batch.page_tables[i])) for i in order],
    )


def _pick(values: Sequence[int], order: Sequence[int]) -> list[int]:
    return [values[i] for i in order]


def _indptr(lengths: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
