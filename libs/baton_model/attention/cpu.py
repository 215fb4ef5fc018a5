"""Attention on a CPU: the native kernels read keys and values where they lie in the pages."""

from __future__ import annotations

import torch

from .. import _kernels
from ..batch import ForwardBatch
from ..cache import KvCache, LatentCache
from .base import AttentionBackend, AttentionStep
from .cpu_latent import CpuLatentAttentionStep
from .pages import page_tables
from .paging import plan_pages


class CpuAttentionStep(AttentionStep):
    """See `AttentionStep`."""

    def __init__(self, cache: KvCache, batch: ForwardBatch, tables: list[list[int]]) -> None:
        self._cache = cache
        self._batch = batch
        self._tables = tables
        # For the number of query heads of the first layer, which is that of all.
        self._native: _kernels.AttentionStep | None = None

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        queries, entries = _rows(queries), _rows(entries)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        if self._native is None:
            self._native = self._plan(queries.shape[1])
        self._native.run(
            cache.tensor[layer].data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
            entries.data_ptr(),
            entries.stride(0),
            out.data_ptr(),
        )
        return out.flatten(1)

    def _plan(self, heads: int) -> _kernels.AttentionStep:
        cache, batch = self._cache, self._batch
        return _kernels.AttentionStep(
            heads=heads,
            kv_heads=cache.kv_heads,
            page_size=cache.page_size,
            head_dim=cache.head_dim,
            tokens_first=cache.order == "NHD",
            bfloat16=cache.dtype == torch.bfloat16,
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            tables=self._tables,
            threads=torch.get_num_threads(),
        )


class CpuAttention(AttentionBackend):
    """Attention for float32 and bfloat16."""

    def plan(self, batch: ForwardBatch, cache: KvCache) -> CpuAttentionStep:
        """See `AttentionBackend.plan`."""
        return CpuAttentionStep(cache, batch, page_tables(batch, cache.page_size, cache.pages))

    def plan_latent(self, batch: ForwardBatch, cache: LatentCache) -> CpuLatentAttentionStep:
        """See `AttentionBackend.plan_latent`."""
        return CpuLatentAttentionStep(cache, plan_pages(batch, cache))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if what belongs to a token lies side by side, otherwise a copy."""
    return x if x[0].is_contiguous() else x.contiguous()
