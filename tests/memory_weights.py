"""A checkpoint in memory that counts what is read of it, and a rank that is alone: enough to load models with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from baton_model.parallel import RankGroup
from baton_model.weights import WeightSource


class AbsentRank(RankGroup):
    """A rank whose others are not there; loading asks nothing of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other ranks are not there")

    all_gather = all_reduce


class MemoryWeights(WeightSource):
    """`counts`: how often each element of each tensor was read."""

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self.path = Path("memory")
        self._state = state
        self.counts: dict[str, np.ndarray] = {name: np.zeros(tensor.shape, int) for name, tensor in state.items()}

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def shape(self, name: str) -> tuple[int, ...]:
        return self._state[name].shape

    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        index = tuple(slice(part.start, part.stop) for part in slices)
        self.counts[name][index] += 1
        return torch.from_numpy(self._state[name][index])

    @property
    def elements(self) -> int:
        """Read in all."""
        return sum(int(count.sum()) for count in self.counts.values())
