"""Which tokens of which sequences the next forward step computes. Pure: no I/O, no clock.

Continuous batching with chunked prefill. Each step first gives every running decode its token, then fills what is
left of the token budget with chunks of prompts, first come first served, as many prompts as fit.

A sequence that samples holds one of `max_batch` slots from its first chunk to its end; slots go out in order of
arrival, so a running sequence never waits for another. Prefill-only sequences need no slot.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from baton_engine.errors import EngineError, SequenceInvalid, StepMismatch
from baton_engine.messages import (
    FinishReason,
    PositionLogprobs,
    Sampling,
    SequenceStart,
    StepItem,
    StepPlan,
    StepResult,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """A request as the scheduler sees it.

    `token_ids`: the prompt. `pages`: cache pages in order, enough for everything that the sequence may ever write.
    `computed`: tokens of the prompt that are in the cache already. `prefill_only`: compute all prompt tokens but the
    last and never sample; otherwise the sequence draws up to `max_tokens` tokens and ends early at one of
    `stop_token_ids` (which include the model's end-of-sequence tokens) unless `ignore_eos`.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    computed: int = 0
    prefill_only: bool = False
    max_tokens: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    @property
    def target(self) -> int:
        """Prompt tokens that must be in the cache before the sequence samples or ends."""
        return len(self.token_ids) - 1 if self.prefill_only else len(self.token_ids)

    @property
    def capacity_needed(self) -> int:
        """Positions that may be written. The last drawn token never is."""
        return self.target if self.prefill_only else len(self.token_ids) + self.max_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens drawn for a sequence, the one that ends it included. `logprobs`: one for each, or empty."""

    sequence_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillAdvanced:
    """A chunk of the prompt is in the cache; `computed` prompt tokens are there now."""

    sequence_id: int
    computed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The sequence has left the scheduler, and no step reads or writes its pages any more. Comes exactly once."""

    sequence_id: int
    reason: FinishReason


Update: TypeAlias = NewTokens | PrefillAdvanced | Finished


@dataclasses.dataclass(slots=True)
class _Running:
    sequence: Sequence
    computed: int  # tokens in the cache: prompt and drawn
    last_token: int | None = None
    drawn: int = 0
    started: bool = False  # the model process knows it
    in_step: bool = False
    cancelled: bool = False

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache yet."""
        return max(self.sequence.target - self.computed, 0) if self.last_token is None else 1


class Scheduler:
    """See the module. One step is in flight at most: `next_step`, then `complete` or `fail`, and so on.

    `chunk_tokens`: tokens of a step, decodes included. Where decodes alone use it up, prompts still get one token a
    step, so that they cannot starve.
    """

    def __init__(self, *, chunk_tokens: int, max_batch: int, page_size: int) -> None:
        for name, value in (("chunk_tokens", chunk_tokens), ("max_batch", max_batch), ("page_size", page_size)):
            if value < 1:
                raise EngineError(f"{name} is {value}; must be at least 1", **{name: value})
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._page_size = page_size
        self._all: dict[int, _Running] = {}  # in order of arrival
        self._no_slot: dict[int, _Running] = {}  # sampling, not yet admitted, in order of arrival
        self._decodes: dict[int, _Running] = {}  # one token a step
        self._slots_used = 0
        self._releases: list[int] = []
        self._next_step = 0
        self._plan: StepPlan | None = None

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises SequenceInvalid if its id is in use, its prompt is empty, it has nothing to compute, `max_tokens` is
        below 1, or its pages don't hold what it may write.
        """
        self._validate(sequence)
        running = _Running(sequence, computed=sequence.computed)
        self._all[sequence.sequence_id] = running
        if not sequence.prefill_only:
            self._no_slot[sequence.sequence_id] = running
            self._admit()

    def cancel(self, sequence_id: int) -> list[Update]:
        """Drops a sequence. Idempotent, and an unknown id is nothing.

        Returns its `Finished` if no step in flight has it; otherwise that comes from `complete` or `fail`, in place
        of whatever the step gave.
        """
        running = self._all.get(sequence_id)
        if running is None:
            return []
        if running.in_step:
            running.cancelled = True
            return []
        return [self._finish(running, FinishReason.CANCELLED)]

    def next_step(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or a step is in flight. Steps count from 0."""
        if self._plan is not None:
            return None
        self._admit()
        items = [self._item(running, 1, prefill=False) for running in self._decodes.values()]
        budget = max(self._chunk_tokens - len(items), 1)
        for sequence_id, running in self._all.items():
            if budget == 0:
                break
            if sequence_id in self._decodes or sequence_id in self._no_slot:
                continue
            tokens = min(running.pending, budget)
            items.append(self._item(running, tokens, prefill=True))
            budget -= tokens
        if not items:
            return None
        starts: list[SequenceStart] = []
        for item in items:
            running = self._all[item.sequence_id]
            running.in_step = True
            if not running.started:
                running.started = True
                sequence = running.sequence
                sampling = None if sequence.prefill_only else sequence.sampling
                starts.append(SequenceStart(sequence.sequence_id, sequence.pages, sampling))
        self._plan = StepPlan(self._next_step, tuple(items), tuple(starts), tuple(self._releases))
        self._releases.clear()
        self._next_step += 1
        return self._plan

    def complete(self, result: StepResult) -> list[Update]:
        """Takes the result of the step in flight and tells what it changed, in the order of the plan's items.

        Raises StepMismatch, and changes nothing, if the result is not that step's.
        """
        plan = self._plan
        samples = sum(item.sample for item in plan.items) if plan else 0
        if plan is None or result.step != plan.step or len(result.token_ids) != samples:
            raise StepMismatch(
                f"a result of step {result.step} with {len(result.token_ids)} tokens; "
                f"in flight: {f'step {plan.step} with {samples}' if plan else 'none'}",
                step=result.step,
            )
        self._plan = None
        updates: list[Update] = []
        sample = 0
        for item in plan.items:
            running = self._all[item.sequence_id]
            running.in_step = False
            running.computed = item.end
            token: int | None = None
            logprobs: tuple[PositionLogprobs, ...] = ()
            if item.sample:
                token = result.token_ids[sample]
                found = result.logprobs[sample] if result.logprobs else None
                logprobs = () if found is None else (found,)
                sample += 1
            if running.cancelled:
                updates.append(self._finish(running, FinishReason.CANCELLED))
                continue
            if item.prefill:
                updates.append(PrefillAdvanced(item.sequence_id, item.end))
            if token is not None:
                running.last_token = token
                running.drawn += 1
                updates.append(NewTokens(item.sequence_id, (token,), logprobs))
            reason = self._finish_reason(running)
            if reason is not None:
                updates.append(self._finish(running, reason))
            else:
                self._place(running)
        return updates

    def fail(self, step: int) -> list[Update]:
        """The step in flight failed: every sequence in it ends, as FAILED or, if it was cancelled, as CANCELLED.

        Raises StepMismatch if `step` is not in flight.
        """
        plan = self._plan
        if plan is None or plan.step != step:
            raise StepMismatch(
                f"step {step} failed; in flight: {plan.step if plan else 'none'}",
                step=step,
            )
        self._plan = None
        updates: list[Update] = []
        for item in plan.items:
            running = self._all[item.sequence_id]
            updates.append(self._finish(running, FinishReason.CANCELLED if running.cancelled else FinishReason.FAILED))
        return updates

    @property
    def in_flight(self) -> StepPlan | None:
        """The step that has been given out and not yet completed."""
        return self._plan

    @property
    def running(self) -> int:
        """Sequences of which at least one token was computed or is being computed."""
        return sum(running.started for running in self._all.values())

    @property
    def waiting(self) -> int:
        """Sequences of which nothing has been computed yet."""
        return len(self._all) - self.running

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens that are not in the cache yet, over all sequences."""
        return sum(max(running.sequence.target - running.computed, 0) for running in self._all.values())

    def _validate(self, sequence: Sequence) -> None:
        problem = ""
        if sequence.sequence_id in self._all:
            problem = "its id is in use"
        elif not sequence.token_ids:
            problem = "its prompt is empty"
        elif not sequence.prefill_only and sequence.max_tokens < 1:
            problem = f"max_tokens is {sequence.max_tokens}; must be at least 1"
        elif not 0 <= sequence.computed < sequence.target:
            problem = f"{sequence.computed} tokens are computed; must be 0 to {sequence.target - 1}"
        elif len(sequence.pages) * self._page_size < sequence.capacity_needed:
            problem = (
                f"{len(sequence.pages)} pages of {self._page_size} tokens; it may write {sequence.capacity_needed}"
            )
        if problem:
            raise SequenceInvalid(f"sequence {sequence.sequence_id}: {problem}", sequence=sequence.sequence_id)

    def _admit(self) -> None:
        while self._no_slot and self._slots_used < self._max_batch:
            self._slots_used += 1
            self._place(self._no_slot.pop(next(iter(self._no_slot))))

    def _place(self, running: _Running) -> None:
        """A sequence with a slot and one token to go is a decode, be it a drawn token or the last of the prompt."""
        if running.pending == 1 and not running.sequence.prefill_only:
            self._decodes[running.sequence.sequence_id] = running

    def _item(self, running: _Running, tokens: int, *, prefill: bool) -> StepItem:
        sequence = running.sequence
        start = running.computed
        prompt = sequence.token_ids[start : start + tokens]
        token_ids = prompt if running.last_token is None else (running.last_token,)
        sample = not sequence.prefill_only and start + tokens >= sequence.target
        return StepItem(sequence.sequence_id, start, token_ids, sample, prefill)

    def _finish_reason(self, running: _Running) -> FinishReason | None:
        sequence = running.sequence
        if sequence.prefill_only:
            return FinishReason.PREFILLED if running.computed >= sequence.target else None
        if running.last_token is None:
            return None
        if running.last_token in sequence.stop_token_ids and not sequence.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if running.drawn >= sequence.max_tokens else None

    def _finish(self, running: _Running, reason: FinishReason) -> Finished:
        sequence_id = running.sequence.sequence_id
        del self._all[sequence_id]
        if self._no_slot.pop(sequence_id, None) is None and not running.sequence.prefill_only:
            self._slots_used -= 1
        self._decodes.pop(sequence_id, None)
        if running.started:
            self._releases.append(sequence_id)
        return Finished(sequence_id, reason)
