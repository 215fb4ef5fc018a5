"""Ranks of one node that combine through shared memory."""

from __future__ import annotations

import torch

from baton_engine._collectives import Element, Group
from baton_memory import SharedMemory
from baton_model.errors import GroupBroken, InvalidBatch
from baton_model.parallel import RankGroup

_ELEMENTS = {torch.float32: Element.FLOAT32, torch.bfloat16: Element.BFLOAT16}

_WORDS = {
    "aborted": "gave the step up",
    "dead": "is gone",
    "late": "did not come in time",
    "differs": "made another call",
}


class SharedGroup(RankGroup):
    """One rank's end of a group over the memory of `group_memory.make_memory`.

    The ranks may be processes or threads, each with a SharedGroup of its own. Tensors are float32 or bfloat16, on the
    CPU. Waiting sleeps in the kernel, after `spin_us` microseconds awake.
    """

    def __init__(self, memory: SharedMemory, rank: int, ranks: int, *, patience_s: float, spin_us: int = 0) -> None:
        """A rank that comes to a call `patience_s` seconds later than this one is stuck. `memory` stays the caller's,
        and must outlive the group."""
        self.rank, self.ranks = rank, ranks
        self._memory = memory
        self._group = Group(memory.address, ranks, rank, round(patience_s * 1e6), spin_us)

    def meet(self) -> None:
        self._check(self._group.meet())

    def begin(self, step: int) -> None:
        # Epoch 0 is what comes before the first step.
        self._group.begin(step + 1)

    def abort(self) -> None:
        self._group.abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        element = _ELEMENTS.get(x.dtype)
        if element is None:
            raise InvalidBatch(f"ranks can't add up {x.dtype}; only float32 and bfloat16", dtype=x.dtype)
        self._check(self._group.all_reduce(x.data_ptr(), x.numel(), element))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows, size = x.shape[:-1], x.element_size()
        result = x

        def allocate(row_bytes: int) -> int:
            nonlocal result
            result = x.new_empty((*rows, row_bytes // size))
            return result.data_ptr()

        self._check(self._group.all_gather(x.data_ptr(), rows.numel(), x.shape[-1] * size, allocate))
        return result

    @staticmethod
    def _check(answer: tuple[str, int]) -> None:
        failure, rank = answer
        if failure:
            raise GroupBroken(f"rank {rank} {_WORDS[failure]}", rank=rank, failure=failure)
