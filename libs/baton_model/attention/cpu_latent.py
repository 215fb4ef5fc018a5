"""Multi-head latent attention on a CPU, over a paged latent cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..cache import LatentCache
from ..layers.latent import LatentHeads
from .base import LatentAttentionStep
from .paging import Chunk, Decodes, PagePlan


class CpuLatentAttentionStep(LatentAttentionStep):
    """See `LatentAttentionStep`. Decodes absorb; a chunk does whichever is less work."""

    def __init__(self, cache: LatentCache, plan: PagePlan) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        self._plan.store(self._cache, layer, entries)
        out = torch.empty((len(queries), queries.shape[1] * heads.value_up.shape[2]), dtype=queries.dtype)
        for chunk in self._plan.chunks:
            if expanding_pays(chunk.stop - chunk.start, chunk.tiles[-1].keys, heads):
                self._attend_expanded(layer, chunk, queries, heads, out)
            else:
                self._attend_absorbed(layer, chunk, queries, heads, out)
        for decodes in self._plan.decodes:
            self._attend_decodes(layer, decodes, queries, heads, out)
        return out

    def _attend_expanded(
        self, layer: int, chunk: Chunk, queries: torch.Tensor, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        keys, values = heads.expand(self._cache.gather(layer, chunk.pages, 1)[0, : chunk.tiles[-1].keys])
        mine = queries[chunk.start : chunk.stop].transpose(0, 1)
        result = out[chunk.start : chunk.stop].view(chunk.stop - chunk.start, len(keys), -1)
        width = values.shape[2]
        # The fused kernel wants values as wide as keys: the further columns are zero and cost less than to do without.
        values = F.pad(values, (0, keys.shape[2] - width)) if width < keys.shape[2] else values
        for tile in chunk.tiles:
            attended = F.scaled_dot_product_attention(
                mine[None, :, tile.start : tile.stop],
                keys[None, :, : tile.keys],
                values[None, :, : tile.keys],
                attn_mask=tile.mask,
                scale=heads.scale,
            )
            result[tile.start : tile.stop] = attended[0, ..., :width].transpose(0, 1)

    def _attend_absorbed(
        self, layer: int, chunk: Chunk, queries: torch.Tensor, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        entries = self._cache.gather(layer, chunk.pages, 1)[0]
        absorbed = heads.absorb(queries[chunk.start : chunk.stop])
        for tile in chunk.tiles:
            # All heads look at the same entries: they are so many more queries of one head.
            mine = absorbed[tile.start : tile.stop].flatten(0, 1)[None]
            mask = None if tile.mask is None else tile.mask.repeat_interleave(absorbed.shape[1], 0)[None]
            attended = _attend(mine, entries[None, : tile.keys], mask, heads)
            rows = slice(chunk.start + tile.start, chunk.start + tile.stop)
            out[rows] = heads.values(attended.view(tile.stop - tile.start, -1, heads.latent))

    def _attend_decodes(
        self, layer: int, decodes: Decodes, queries: torch.Tensor, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        entries = self._cache.gather(layer, decodes.pages, decodes.count)[:, : decodes.keys]
        out[decodes.rows] = heads.values(_attend(heads.absorb(queries[decodes.rows]), entries, decodes.mask, heads))


def _attend(
    queries: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor | None, heads: LatentHeads
) -> torch.Tensor:
    """Absorbed queries `[B, Q, width]` over entries `[B, T, width]` to `[B, Q, latent]`; mask `[B, 1 or Q, T]`.

    Two plain products: the fused kernel takes as long in float32 and 3 to 4 times as long in bfloat16, where it does
    not go through oneDNN (one core; 16 heads over 2,048 tokens of 512 + 64: 0.34 ms against 1.11).
    """
    shape = (*queries.shape[:2], entries.shape[1])
    bias = queries.new_zeros(1, 1, 1) if mask is None else mask
    scores = torch.baddbmm(
        bias.expand(shape), queries, entries.transpose(1, 2), beta=0 if mask is None else 1, alpha=heads.scale
    )
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(entries.dtype), entries[..., : heads.latent])


def expanding_pays(queries: int, keys: int, heads: LatentHeads) -> bool:
    """Whether a chunk of so many queries that see `keys` tokens at most is less work expanded than absorbed.

    Counted in multiplications a head: a pair of query and token costs `nope + rope + value` or `2 latent + rope`, and
    the projections `latent (nope + value)` a token or a query.
    """
    nope, latent = heads.key_up.shape[1:]
    projection = latent * (nope + heads.value_up.shape[2])
    pairs = queries * (keys - (queries - 1) / 2)
    return projection * (keys - queries) < pairs * (2 * latent - nope - heads.value_up.shape[2])
