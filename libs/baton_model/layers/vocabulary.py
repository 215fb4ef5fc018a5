"""The two ends of a model: from words to vectors and back, the vocabulary split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..parallel import RankGroup
from .linear import Linear


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows `words` of the table: weight `[len(words), hidden_size]`. A rank looks up the words that it has; the sum
    over the ranks has every word's vector once."""

    weight: torch.Tensor
    words: range
    group: RankGroup

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 `[N]` to `[N, hidden_size]`, the same on every rank and owned by the caller."""
        if self.group.ranks == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.words.start
        elsewhere = (local < 0) | (local >= len(self.words))
        found = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce(found.masked_fill_(elsewhere[:, None], 0))


@dataclass(frozen=True, slots=True)
class Head:
    """Logits: each rank makes those of its words, and all of them get all."""

    linear: Linear
    group: RankGroup

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[M, hidden_size]` to float32 `[M, vocab_size]`, the same on every rank."""
        return self.group.all_gather(self.linear(hidden)).to(torch.float32)
