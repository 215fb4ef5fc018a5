"""What a sharded layer asks of the ranks that hold the other shards."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class RankGroup(ABC):
    """The tensor-parallel ranks of one model: `ranks` processes that run the same batches in the same order.

    Every rank makes the same calls with the same shapes and dtypes. A call returns once all ranks have made it, with
    a tensor that is the caller's own (no later call touches it), and raises `baton_model.errors.GroupBroken` when one
    of them is gone.
    """

    rank: int
    ranks: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, the same bits on all of them: ranks that sample would else drift apart. May be
        `x` itself, changed."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x [..., n]` side by side in order of rank: `[..., sum of n]`. The ranks' n may differ."""

    def meet(self) -> None:  # noqa: B027 - most groups have nothing to do
        """Returns once all ranks have called it, however long they take: for ranks that still load. Raises GroupBroken
        when one is gone."""

    def begin(self, step: int) -> None:  # noqa: B027
        """Step `step` begins, a higher one than the last. No rank calls this before all have left the former step, by
        which a rank that failed in it is in step with the others again."""

    def abort(self) -> None:  # noqa: B027
        """This rank leaves the step before its end: the others' calls of this step raise GroupBroken, now or when they
        are made."""


class Solo(RankGroup):
    """The group of a model that is not sharded."""

    rank = 0
    ranks = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


SOLO = Solo()
