"""Drives an engine as a worker does, for tests: sequences in, tokens out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from baton_engine.client import EngineClient
from baton_engine.messages import FinishReason, PositionLogprobs, Sampling, StepPlan, StepResult
from baton_engine.scheduler import Finished, NewTokens, Scheduler, Sequence

GREEDY = Sampling(temperature=0)


@dataclasses.dataclass
class Output:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None


class Driver:
    """One scheduler over one engine; step numbers and sequence ids go on from call to call."""

    def __init__(self, client: EngineClient, *, chunk_tokens: int = 512) -> None:
        self.client = client
        self.scheduler = Scheduler(
            chunk_tokens=chunk_tokens, max_batch=client.info.max_batch, page_size=client.info.page_size
        )
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self._ids = itertools.count(1)
        self._next_page = 0

    def chunk(self, chunk_tokens: int) -> None:
        """Changes the chunk size between runs."""
        self.scheduler._chunk_tokens = chunk_tokens

    def sequence(self, prompt: Iterable[int], max_tokens: int = 8, sampling: Sampling = GREEDY) -> Sequence:
        """A sequence on pages of its own, taken round the pool, last page first: the order must not matter."""
        token_ids = tuple(prompt)
        count = -(-(len(token_ids) + max_tokens) // self.client.info.page_size)
        pages = [(self._next_page + index) % self.client.info.pages for index in reversed(range(count))]
        self._next_page += count
        return Sequence(next(self._ids), token_ids, tuple(pages), max_tokens=max_tokens, sampling=sampling)

    async def run(self, sequences: Iterable[Sequence]) -> list[Output]:
        """Runs sequences together to their end."""
        outputs: dict[int, Output] = {}
        for sequence in sequences:
            outputs[sequence.sequence_id] = Output()
            self.scheduler.add(sequence)
        while (plan := self.scheduler.next_step()) is not None:
            result = await self.client.step(plan)
            self.steps.append((plan, result))
            for update in self.scheduler.complete(result):
                output = outputs[update.sequence_id]
                if isinstance(update, NewTokens):
                    output.tokens += update.token_ids
                    output.logprobs += update.logprobs
                elif isinstance(update, Finished):
                    output.reason = update.reason
        return list(outputs.values())
