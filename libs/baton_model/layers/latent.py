"""The heads of multi-head latent attention (DeepSeek-AI, 2024, section 2.1): how they read a shared latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """This rank's up-projections from the latent c of a token to each head's key and value.

    * `key_up`: `[heads, nope, latent]`; `value_up`: `[heads, latent, value]`. An entry of the cache is c followed by
      the rotated key part that all heads share, `[latent + rope]`.
    * A query is `[nope + rope]` a head. Head h scores an entry by `scale * (q_nope . key_up[h] c + q_rope . k_rope)`
      and reads `c value_up[h]` of it.

    That sum can be had in two ways. Expanded: keys and values of every head are computed from the latents, and
    attention is ordinary. Absorbed: `q_nope . key_up c = (q_nope key_up) . c`, so the query is projected instead, once;
    attention is over the latents, and the heads' sums of them are projected to values afterwards. Expanding costs more
    the more tokens there are, absorbing the more queries.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor
    scale: float

    @property
    def latent(self) -> int:
        """Elements of c."""
        return self.key_up.shape[2]

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries `[N, heads, nope + rope]` as ones that look at entries: `[N, heads, latent + rope]`."""
        nope, rope = queries[..., : self.key_up.shape[1]], queries[..., self.key_up.shape[1] :]
        return torch.cat((torch.bmm(nope.transpose(0, 1), self.key_up).transpose(0, 1), rope), dim=-1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What absorbed attention gave, `[N, heads, latent]`, as sums of values: `[N, heads * value]`."""
        return torch.bmm(attended.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)

    def expand(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[heads, T, nope + rope]` and values `[heads, T, value]` of entries `[T, latent + rope]`."""
        latent, rope = entries[:, : self.latent], entries[:, self.latent :]
        heads, nope, _ = self.key_up.shape
        keys = entries.new_empty(heads, len(entries), nope + rope.shape[1])
        torch.matmul(latent, self.key_up.transpose(1, 2), out=keys[..., :nope])
        keys[..., nope:] = rope
        return keys, torch.matmul(latent, self.value_up)
