"""What a family asks of attention, and what a backend promises."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..batch import ForwardBatch
from ..cache import KvCache, LatentCache
from ..layers.latent import LatentHeads


class AttentionStep(ABC):
    """Attention of one forward pass, good for every layer of it and for nothing else."""

    @abstractmethod
    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Stores the new KV entries of a layer, then attends.

        `queries`: `[N, heads, head_dim]`; `entries`: `[N, 2, kv_heads, head_dim]`, K and V; both rotated already, in
        the order of the batch, possibly strided. `heads` is a multiple of `kv_heads`; query head j reads KV head
        `j // (heads / kv_heads)`. Token i of a sequence attends to the sequence's tokens 0 to i, those of earlier
        passes included. Scores are scaled by `head_dim ** -0.5`.

        A page whose first token is stored here holds zeros after its last: nothing of an earlier owner is left in it.
        On return the entries are in the cache's pages, or on a GPU are ordered before whatever is queued next. Returns
        `[N, heads * head_dim]` in the queries' dtype, owned by the caller.
        """


class LatentAttentionStep(ABC):
    """Multi-head latent attention of one forward pass, good for every layer of it and for nothing else."""

    @abstractmethod
    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Stores the new latent entries of a layer, then attends, absorbed or expanded as the backend sees fit.

        `queries`: `[N, heads, nope + rope]`; `entries`: `[N, latent + rope]`, the normalised latent and the shared
        key part; rotary parts rotated already, in the order of the batch, possibly strided. Token i of a sequence
        attends to the sequence's tokens 0 to i, those of earlier passes included. Scores and values are as
        `LatentHeads` says.

        The promises about pages are those of `AttentionStep`. Returns `[N, heads * value]` in the queries' dtype, owned
        by the caller.
        """


class AttentionBackend(ABC):
    """Plans attention for a forward pass. Holds nothing of a batch between passes, and never a cache."""

    @abstractmethod
    def plan(self, batch: ForwardBatch, cache: KvCache) -> AttentionStep:
        """All work that depends on the batch but not on the layer. The batch has been validated; its page tables may
        not change while the step is in use. Raises `InvalidBatch` where pages are missing or out of range."""

    @abstractmethod
    def plan_latent(self, batch: ForwardBatch, cache: LatentCache) -> LatentAttentionStep:
        """As `plan`, for models with a latent cache."""
