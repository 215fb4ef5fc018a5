"""A loaded model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .batch import ForwardBatch
from .cache import CacheShape, PagedCache
from .config import ModelConfig
from .errors import InvalidBatch
from .parallel import RankGroup

C = TypeVar("C", bound=PagedCache)


class DraftModule(ABC):
    """Predicts one token further than what it is fed (multi-token prediction: DeepSeek-AI, 2024, DeepSeek-V3, section
    2.2). Module k (from 1) of a model takes for token i the hidden state that module k - 1, or for k = 1 the model
    itself, returned for it, and token i + k; from what it returns `Model.logits` makes those of token i + k + 1.

    Its entries lie in layer `layers + k - 1` of the model's own cache, in the same pages and at the same place as the
    entries of token i: they are reserved, transferred and freed with those of the model.
    """

    @abstractmethod
    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedCache,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """`batch`: tokens that the model's own `forward` has had, all earlier ones of their sequences having been here
        before; `hidden`: `[N, hidden_size]`; `next_token_ids`: int64 `[N]`, for each the token k places after it.

        Returns normalised hidden states `[N, hidden_size]`. Raises `InvalidBatch` before anything is written."""


class Model(ABC):
    """Weights and the forward pass. Holds nothing of a batch between calls; one caller at a time.

    `config` is the whole model's. Of a sharded model this is what rank `group.rank` holds: every rank makes the same
    calls with the same batches in the same order, each with a cache of its own `rank_kv_heads`, and all get the same
    results, to the bit.
    """

    config: ModelConfig
    group: RankGroup
    rank_kv_heads: int
    dtype: torch.dtype
    device: torch.device
    mtp: Sequence[DraftModule] = ()

    @property
    def cache_shape(self) -> CacheShape:
        """What this rank's cache must hold; `cache.open_cache` makes one."""
        return CacheShape(self.config.layers, self.rank_kv_heads, self.config.head_dim)

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, cache: PagedCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Runs all layers over the batch's N new tokens and stores their KV entries in the cache's pages.

        `on_layer(l)` is called right after the attention output projection of layer l: its KV entries are in the
        pages of every rank then. Returns the final hidden states, normalised, `[N, hidden_size]`; pick the rows whose
        logits are wanted. Raises `InvalidBatch` before anything is written.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[M, vocab_size]` for rows `[M, hidden_size]` of what `forward` returned."""

    def check(self, batch: ForwardBatch, cache: PagedCache, kind: type[C]) -> C:
        """The cache, as one of that kind. Raises `InvalidBatch` where batch or cache doesn't fit this model."""
        batch.validate()
        config = self.config
        if not isinstance(cache, kind) or (cache.shape, cache.dtype) != (self.cache_shape, self.dtype):
            raise InvalidBatch(
                f"the cache has {_text(cache.shape)} in {cache.dtype}; the rank needs {_text(self.cache_shape)} in "
                f"{self.dtype}"
            )
        longest = max(batch.context_lens, default=0)
        if longest > config.context_length:
            raise InvalidBatch(
                f"a sequence has {longest} tokens; the model's context is {config.context_length}",
                context_len=longest,
                context_length=config.context_length,
            )
        least, greatest = batch.token_range() or (0, 0)
        if not 0 <= least <= greatest < config.vocab_size:
            raise InvalidBatch(f"token ids are {least} to {greatest}; they must be in [0, {config.vocab_size})")
        return cache


def _text(shape: CacheShape) -> str:
    entries = "latent entries" if shape.latent else f"{shape.kv_heads} KV heads"
    return f"{shape.layers} layers of {entries} of {shape.head_dim}"
