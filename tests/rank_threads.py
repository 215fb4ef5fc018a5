"""Tensor-parallel ranks as threads of one process: what the tests of sharded models run on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from baton_model.errors import GroupBroken
from baton_model.parallel import RankGroup

T = TypeVar("T")

# Far above what any call in a test takes: a rank that never comes fails the test instead of hanging it.
_PATIENCE_S = 60.0


class _Meeting:
    """Where the ranks lay down what they bring."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * ranks


class ThreadRank(RankGroup):
    """One rank. A call that another rank never makes, or makes of another shape, is `GroupBroken`."""

    def __init__(self, rank: int, ranks: int, meeting: _Meeting) -> None:
        self.rank, self.ranks = rank, ranks
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        if len({part.shape for part in parts}) > 1:
            raise GroupBroken(f"the ranks reduce shapes {[list(part.shape) for part in parts]}; they must be equal")
        # From the first rank on, on every rank: the same bits.
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.brought[self.rank] = x.clone()
        try:
            self._meeting.barrier.wait(_PATIENCE_S)
            parts = list(self._meeting.brought)
            self._meeting.barrier.wait(_PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise GroupBroken(f"rank {self.rank} waited for the others in vain", rank=self.rank) from error
        return parts


def on_ranks(ranks: int, work: Callable[[RankGroup], T]) -> list[T]:
    """Runs `work(group)` on every rank at once; the results in order of rank. The first failure is raised, and ends
    the others' waiting."""
    meeting = _Meeting(ranks)

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, ranks, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        for failure in sorted(failures, key=lambda error: isinstance(error, GroupBroken)):
            raise failure
        return [future.result() for future in futures]
