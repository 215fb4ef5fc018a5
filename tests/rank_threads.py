"""Tensor-parallel ranks as threads of one process: what processes do, without their start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton_engine.group_memory import make_memory
from baton_engine.shared_group import SharedGroup
from baton_model.errors import GroupBroken

T = TypeVar("T")


def on_ranks(ranks: int, work: Callable[[SharedGroup], T], *, patience_s: float = 60.0) -> list[T]:
    """Runs `work(group)` on every rank at once; the results in order of rank. The first failure is raised, and ends
    the others' waiting. A rank that never comes fails the test after `patience_s` instead of hanging it."""

    def run(group: SharedGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with make_memory(ranks) as memory, ThreadPoolExecutor(ranks) as threads:
        groups = [SharedGroup(memory, rank, ranks, patience_s=patience_s) for rank in range(ranks)]
        futures = [threads.submit(run, group) for group in groups]
        failures = [error for future in futures if (error := future.exception()) is not None]
        for failure in sorted(failures, key=lambda error: isinstance(error, GroupBroken)):
            raise failure
        return [future.result() for future in futures]
