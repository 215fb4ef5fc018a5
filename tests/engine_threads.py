"""An engine whose ranks are threads of the test: model, cache and layer counter of each, without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

from baton_engine.baton_runner import load_model
from baton_engine.executor import Executor, cache_layout
from baton_engine.group_memory import make_memory
from baton_engine.messages import EngineInfo, EngineSpec, StepPlan, StepResult
from baton_engine.model_process import describe
from baton_engine.ranks import rank_specs
from baton_engine.shared_group import SharedGroup

T = TypeVar("T")


class ThreadEngine:
    """What `EngineClient` is to a worker, with `executors` in reach. Close it."""

    def __init__(self, spec: EngineSpec) -> None:
        self._stack = ExitStack()
        memory = self._stack.enter_context(make_memory(spec.ranks))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(spec.ranks, initializer=_quietly))
        self.specs = rank_specs(spec)
        self.groups = [SharedGroup(memory, each.rank, spec.ranks, patience_s=20.0) for each in self.specs]
        self.executors: list[Executor] = []
        made = self.on_ranks(self._load)
        self.executors = [executor for executor, _ in made]
        self.info = made[0][1]

    def on_ranks(self, work: Callable[[int], T]) -> list[T]:
        """Runs `work(rank)` on every rank's thread at once; the results in order of rank."""
        futures = [self._threads.submit(work, rank) for rank in range(len(self.specs))]
        return [future.result() for future in futures]

    def run(self, plan: StepPlan) -> StepResult:
        """One step on all ranks; what rank 0 answers."""
        return self.on_ranks(lambda rank: self.executors[rank].run(plan, 0))[0]

    async def step(self, plan: StepPlan) -> StepResult:
        return self.run(plan)

    def close(self) -> None:
        self._stack.close()

    def _load(self, rank: int) -> tuple[Executor, EngineInfo]:
        spec = self.specs[rank]
        runner = load_model(spec, lambda stage, fraction: None, self.groups[rank])
        layout = cache_layout(spec, runner.facts)
        return Executor(runner, layout, self.groups[rank]), describe(spec, runner.facts, layout)


def _quietly() -> None:
    # Of the thread, like everything that torch calls a mode.
    torch.set_grad_enabled(False)
