"""Attention on a CPU: pages are gathered by row copies, then torch's fused kernel attends."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..batch import ForwardBatch
from ..cache import KvCache, LatentCache
from .base import AttentionBackend, AttentionStep
from .cpu_latent import CpuLatentAttentionStep
from .paging import Chunk, Decodes, PagePlan, plan_pages


class CpuAttentionStep(AttentionStep):
    """See `AttentionStep`."""

    def __init__(self, cache: KvCache, plan: PagePlan) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        self._plan.store(self._cache, layer, entries)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        for chunk in self._plan.chunks:
            self._attend_chunk(layer, chunk, queries, out)
        for decodes in self._plan.decodes:
            self._attend_decodes(layer, decodes, queries, out)
        return out.flatten(1)

    def _attend_chunk(self, layer: int, chunk: Chunk, queries: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self._cache.gather(layer, chunk.pages, 1)
        heads = queries[chunk.start : chunk.stop].transpose(0, 1)[None]
        result = out[chunk.start : chunk.stop]
        for tile in chunk.tiles:
            attended = F.scaled_dot_product_attention(
                heads[:, :, tile.start : tile.stop],
                keys[:, :, : tile.keys],
                values[:, :, : tile.keys],
                attn_mask=tile.mask,
                enable_gqa=True,
            )
            result[tile.start : tile.stop] = attended[0].transpose(0, 1)

    def _attend_decodes(self, layer: int, decodes: Decodes, queries: torch.Tensor, out: torch.Tensor) -> None:
        cache = self._cache
        keys, values = cache.gather(layer, decodes.pages, decodes.count)
        # The query heads that share a KV head are as good as so many queries of that head.
        grouped = queries[decodes.rows].view(decodes.count, cache.kv_heads, -1, cache.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped,
            keys[:, :, : decodes.keys],
            values[:, :, : decodes.keys],
            attn_mask=None if decodes.mask is None else decodes.mask[:, None],
        )
        out[decodes.rows] = attended.flatten(1, 2)


class CpuAttention(AttentionBackend):
    """Attention for float32 and bfloat16: over keys and values through `scaled_dot_product_attention`."""

    def plan(self, batch: ForwardBatch, cache: KvCache) -> CpuAttentionStep:
        """See `AttentionBackend.plan`."""
        return CpuAttentionStep(cache, plan_pages(batch, cache))

    def plan_latent(self, batch: ForwardBatch, cache: LatentCache) -> CpuLatentAttentionStep:
        """See `AttentionBackend.plan_latent`."""
        return CpuLatentAttentionStep(cache, plan_pages(batch, cache))
