"""A loaded model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from .batch import ForwardBatch
from .cache import KvCache
from .config import ModelConfig
from .errors import InvalidBatch
from .parallel import RankGroup


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

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, cache: KvCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Runs all layers over the batch's N new tokens and stores their KV entries in the cache's pages.

        `on_layer(l)` is called right after the attention output projection of layer l: its KV entries are in the
        pages of every rank then. Returns the final hidden states, normalised, `[N, hidden_size]`; pick the rows whose
        logits are wanted. Raises `InvalidBatch` before anything is written.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[M, vocab_size]` for rows `[M, hidden_size]` of what `forward` returned."""

    def check(self, batch: ForwardBatch, cache: KvCache) -> None:
        """Raises `InvalidBatch` where batch or cache doesn't fit this model."""
        batch.validate()
        config = self.config
        if (cache.layers, cache.kv_heads, cache.head_dim, cache.dtype) != (
            config.layers,
            self.rank_kv_heads,
            config.head_dim,
            self.dtype,
        ):
            raise InvalidBatch(
                f"the cache has {cache.layers} layers of {cache.kv_heads} KV heads of {cache.head_dim} in "
                f"{cache.dtype}; the rank needs {config.layers}, {self.rank_kv_heads}, {config.head_dim} and "
                f"{self.dtype}"
            )
        longest = max(batch.context_lens, default=0)
        if longest > config.context_length:
            raise InvalidBatch(
                f"a sequence has {longest} tokens; the model's context is {config.context_length}",
                context_len=longest,
                context_length=config.context_length,
            )
        if (
            len(batch.token_ids)
            and not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < config.vocab_size
        ):
            raise InvalidBatch(
                f"token ids are {int(batch.token_ids.min())} to {int(batch.token_ids.max())}; they must be in "
                f"[0, {config.vocab_size})"
            )
