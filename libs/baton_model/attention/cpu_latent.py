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
        self._decode_masks = [_to_whole_pages(decodes, cache) for decodes in plan.decodes]

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        self._plan.store(self._cache, layer, entries)
        out = torch.empty((len(queries), queries.shape[1] * heads.value_up.shape[2]), dtype=queries.dtype)
        for chunk in self._plan.chunks:
            if expanding_pays(chunk.stop - chunk.start, chunk.tiles[-1].keys, heads):
                self._attend_expanded(layer, chunk, queries, heads, out)
            else:
                self._attend_absorbed(layer, chunk, queries, heads, out)
        for decodes, mask in zip(self._plan.decodes, self._decode_masks, strict=True):
            self._attend_decodes(layer, decodes, mask, queries, heads, out)
        return out

    def _attend_expanded(
        self, layer: int, chunk: Chunk, queries: torch.Tensor, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        keys, values = heads.expand(self._cache.gather(layer, chunk.pages, 1)[0, : chunk.tiles[-1].keys])
        mine = queries[chunk.start : chunk.stop].transpose(0, 1)
        result = out[chunk.start : chunk.stop].view(chunk.stop - chunk.start, len(keys), -1)
        for tile in chunk.tiles:
            mask = None if tile.mask is None else tile.mask[None]
            seen = keys[:, : tile.keys], values[:, : tile.keys]
            attended = _attend(mine[:, tile.start : tile.stop], *seen, mask, heads.scale)
            result[tile.start : tile.stop] = attended.transpose(0, 1)

    def _attend_absorbed(
        self, layer: int, chunk: Chunk, queries: torch.Tensor, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        entries = self._cache.gather(layer, chunk.pages, 1)[0]
        absorbed = heads.absorb(queries[chunk.start : chunk.stop])
        for tile in chunk.tiles:
            # All heads look at the same entries: they are so many more queries of one head.
            mine = absorbed[tile.start : tile.stop].flatten(0, 1)[None]
            mask = None if tile.mask is None else tile.mask.repeat_interleave(absorbed.shape[1], 0)[None]
            seen = entries[: tile.keys][None]
            attended = _attend(mine, seen, seen[..., : heads.latent], mask, heads.scale)
            rows = slice(chunk.start + tile.start, chunk.start + tile.stop)
            out[rows] = heads.values(attended.view(tile.stop - tile.start, -1, heads.latent))

    def _attend_decodes(
        self,
        layer: int,
        decodes: Decodes,
        mask: torch.Tensor | None,
        queries: torch.Tensor,
        heads: LatentHeads,
        out: torch.Tensor,
    ) -> None:
        entries = self._cache.gather(layer, decodes.pages, decodes.count)
        if decodes.count == 1:
            entries = entries[0, : decodes.keys][None]
        else:
            # Masked scores are nothing, unless an earlier owner of a page left what is not a number.
            for mine, context in zip(entries, decodes.contexts, strict=True):
                mine[context:] = 0
        absorbed, latents = heads.absorb(queries[decodes.rows]), entries[..., : heads.latent]
        out[decodes.rows] = heads.values(_attend(absorbed, entries, latents, mask, heads.scale))


def _to_whole_pages(decodes: Decodes, cache: LatentCache) -> torch.Tensor | None:
    """The mask for all tokens of all gathered pages: what is behind the longest context is masked, not cut off.

    Cut, several sequences aren't one block of memory, and are copied for a product in bfloat16: 1.9 ms instead of 0.3
    for 16 heads of 4 sequences over 1,025 tokens (one core).
    """
    if decodes.count == 1:
        return None
    beyond = len(decodes.pages) // decodes.count * cache.page_size - decodes.keys
    if beyond == 0:
        return decodes.mask
    mask = torch.zeros(1, 1, decodes.keys, dtype=cache.dtype) if decodes.mask is None else decodes.mask
    return F.pad(mask, (0, beyond), value=float("-inf"))


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Queries `[B, Q, width]` over keys `[B, T, width]` and values `[B, T, value]` to `[B, Q, value]`; the mask
    `[B or 1, Q or 1, T]` is added to the scores.

    Two plain products: the fused kernel takes as long in float32 and 3 to 4 times as long in bfloat16, where it does
    not go through oneDNN (one core; 16 heads over 2,048 tokens of 512 + 64: 0.34 ms against 1.11; 128 queries of 16
    heads over 512 keys of 192: 3.1 ms against 10.5).
    """
    shape = (*queries.shape[:2], keys.shape[1])
    bias = queries.new_zeros(1, 1, 1) if mask is None else mask
    scores = torch.baddbmm(
        bias.expand(shape), queries, keys.transpose(1, 2), beta=0 if mask is None else 1, alpha=scale
    )
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)


def expanding_pays(queries: int, keys: int, heads: LatentHeads) -> bool:
    """Whether a chunk of so many queries that see `keys` tokens at most is less work expanded than absorbed.

    Counted in multiplications a head: a pair of query and token costs `nope + rope + value` or `2 latent + rope`, and
    the projections `latent (nope + value)` a token or a query. Times follow that: at DeepSeek's sizes with 4 and 16
    heads, float32 and bfloat16, 4 to 512 queries and 64 to 2,048 tokens, the count chose the faster way in 38 cases of
    40 (one core; 512 of 512, 16 heads, bfloat16: 17 ms expanded, 28 absorbed; 64 of 2,048: 32 and 16).
    """
    nope, latent = heads.key_up.shape[1:]
    projection = latent * (nope + heads.value_up.shape[2])
    pairs = queries * (keys - (queries - 1) / 2)
    return projection * (keys - queries) < pairs * (2 * latent - nope - heads.value_up.shape[2])
