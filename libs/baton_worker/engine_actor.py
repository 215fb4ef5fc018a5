"""Owns the scheduler: takes sequences, keeps one step in flight, and tells every sequence what it gave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from baton_actors.actor import Actor, ActorStopped, handles
from baton_engine.client import EngineClient
from baton_engine.errors import EngineDied, EngineError, SequenceInvalid, StepFailedError
from baton_engine.messages import FinishReason, StepPlan, StepResult
from baton_engine.scheduler import Finished, NewTokens, Scheduler, Sequence, Update
from baton_kv.prefix import PageChain
from baton_worker.errors import EngineUnavailable, StepFailed
from baton_worker.reservation import PageReserver

log = logging.getLogger(__name__)

# After so many failed steps without one that was done in between, the engine is taken for broken: a device that has
# faulted fails every step from then on, and so do ranks that can't find together again. Prompts that make a model fail
# come one at a time, between others that it can compute.
MAX_FAILURES_IN_A_ROW = 5


class StepHooks(Protocol):
    """What a worker does around a step."""

    def before_step(self, plan: StepPlan) -> None:
        """The step is about to run. Must not wait."""

    async def after_failed_step(self, plan: StepPlan) -> None:
        """The step failed; no other begins before this returns."""


class NoHooks:
    def before_step(self, plan: StepPlan) -> None: ...

    async def after_failed_step(self, plan: StepPlan) -> None: ...


@dataclass(frozen=True)
class Event:
    """An update of one sequence, with the step that gave it (None: it was cancelled between steps)."""

    update: Update
    step: StepResult | None


class SequenceStream:
    """What a sequence gives, until its `Finished`, which comes exactly once and last."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def put(self, event: Event | Exception) -> None:
        """An exception is the end of the stream."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises EngineUnavailable if the engine dies, StepFailed if a step with this sequence fails, and
        SequenceInvalid if the scheduler refused it."""
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event.update, Finished) and event.update.reason is FinishReason.FAILED:
                raise StepFailed(
                    f"a forward step with sequence {event.update.sequence_id} failed; see the worker's log"
                )
            yield event
            if isinstance(event.update, Finished):
                return


@dataclass
class _Live:
    """A sequence from its submission to its end. `chain`: of its prompt; None without a prefix cache, and once a step
    with it has failed: nothing of it is offered then."""

    sequence: Sequence
    owner: Hashable
    stream: SequenceStream
    chain: PageChain | None
    # Of the chain's pages, how many the prefix cache knows of.
    kept: int = 0
    drawn: list[int] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Tokens whose entries are in the pages for certain. The last one drawn is not; a prompt of which only a part
        was computed does not count."""
        if not self.drawn:
            return self.sequence.computed
        return len(self.sequence.token_ids) + len(self.drawn) - 1


@dataclass(frozen=True)
class _Submit:
    sequence: Sequence


@dataclass(frozen=True)
class _Cancel:
    sequence_id: int


@dataclass(frozen=True)
class _StepDone:
    plan: StepPlan
    result: StepResult


@dataclass(frozen=True)
class _StepFailed:
    plan: StepPlan
    error: StepFailedError


@dataclass(frozen=True)
class _StepBroken:
    """The step ended in no way that a step can: the engine is not to be trusted any more."""

    error: Exception


class EngineActor(Actor):
    """Lives and dies with one model process.

    A sequence's owner lets go of its pages here, when the sequence has left the scheduler: no step in flight can write
    them then.
    """

    # Sequences are bounded by the pages that each holds, and so are the messages about them; a mailbox that is full
    # would lose a cancellation, or the result of a step.
    mailbox_capacity = 0

    def __init__(
        self,
        client: EngineClient,
        scheduler: Scheduler,
        reserver: PageReserver,
        hooks: StepHooks,
        on_step: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        """`on_step` is told of every step that was done, for the metrics."""
        super().__init__("engine")
        self._on_step = on_step
        self.scheduler = scheduler
        self.steps_done = 0
        # Number of the latest step that was done: the layer counter is behind its last layer. None before the first.
        self.last_step: int | None = None
        # What the streams are told when the actor stops.
        self.ending = "the worker is shutting down"
        self._client = client
        self._reserver = reserver
        self._hooks = hooks
        self._live: dict[int, _Live] = {}
        self._step: asyncio.Task[None] | None = None
        self._failures_in_a_row = 0

    def submit(self, sequence: Sequence, owner: Hashable, chain: PageChain | None = None) -> SequenceStream:
        """Hands a sequence and its pages' owner over: from now on the owner's hold is released by this actor.

        With `chain`, of its prompt without the last token, what is written into the sequence's pages goes into the
        prefix cache as soon as it is certain: what was computed before at once, the prompt with the first token drawn,
        everything at the end. After a failed step nothing of the sequence is offered any more.

        Raises EngineUnavailable, and SequenceInvalid for an id in use. Then the owner still holds them.
        """
        sequence_id = sequence.sequence_id
        if sequence_id in self._live:
            raise SequenceInvalid(f"sequence {sequence_id}: its id is in use", sequence=sequence_id)
        live = _Live(sequence, owner, SequenceStream(), chain)
        # Known at once: messages that still wait when the actor stops are dropped, but their streams must hear of it.
        self._live[sequence_id] = live
        try:
            self.tell(_Submit(sequence))
        except ActorStopped as error:
            del self._live[sequence_id]
            raise EngineUnavailable("the model process is gone") from error
        self._keep(live)
        return live.stream

    def cancel(self, sequence_id: int) -> None:
        """Idempotent; a sequence that has ended is nothing."""
        if self.running:
            self.tell(_Cancel(sequence_id))

    async def on_stop(self, error: BaseException | None) -> None:
        if self._step is not None:
            self._step.cancel()
        for live in self._live.values():
            # One for each: an exception that many tasks raise would collect the tracebacks of all.
            live.stream.put(EngineUnavailable(f"the engine failed: {error}" if error else self.ending))
        self._live.clear()

    @handles
    async def _on_submit(self, message: _Submit) -> None:
        try:
            self.scheduler.add(message.sequence)
        except EngineError as error:
            log.error("the scheduler refused a sequence: %s", error)
            live = self._live.pop(message.sequence.sequence_id)
            self._reserver.release(live.owner)
            live.stream.put(error)
        self._begin_step()

    @handles
    async def _on_cancel(self, message: _Cancel) -> None:
        self._deliver(self.scheduler.cancel(message.sequence_id), None)

    @handles
    async def _on_step_done(self, message: _StepDone) -> None:
        self.steps_done += 1
        self._failures_in_a_row = 0
        self.last_step = message.plan.step
        updates = self.scheduler.complete(message.result)
        # The next step runs while the tokens of this one are on their way.
        self._begin_step()
        self._deliver(updates, message.result)
        if self._on_step is not None:
            self._on_step(message.plan, message.result)

    @handles
    async def _on_step_failed(self, message: _StepFailed) -> None:
        log.error("%s", message.error)
        for item in message.plan.items:
            live = self._live[item.sequence_id]
            # Perhaps it failed of what is in the pages: nobody else shall, from now on.
            self._reserver.forget(live.sequence.pages)
            live.chain = None
        await self._hooks.after_failed_step(message.plan)
        self._deliver(self.scheduler.fail(message.plan.step), None)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineError(f"{self._failures_in_a_row} steps in a row failed; the last one: {message.error}")
        self._begin_step()

    @handles
    async def _on_step_broken(self, message: _StepBroken) -> None:
        raise message.error

    def _begin_step(self) -> None:
        plan = self.scheduler.next_step()
        if plan is not None:
            self._hooks.before_step(plan)
            self._step = asyncio.create_task(self._run_step(plan), name=f"step {plan.step}")

    async def _run_step(self, plan: StepPlan) -> None:
        try:
            result = await self._client.step(plan)
        except StepFailedError as error:
            self._tell_if_running(_StepFailed(plan, error))
        except EngineDied:
            # The host watches the process and stops this actor with the reason.
            return
        except Exception as error:
            self._tell_if_running(_StepBroken(error))
        else:
            self._tell_if_running(_StepDone(plan, result))

    def _tell_if_running(self, message: _StepDone | _StepFailed | _StepBroken) -> None:
        if self.running:
            self.tell(message)

    def _deliver(self, updates: list[Update], step: StepResult | None) -> None:
        for update in updates:
            live = self._live[update.sequence_id]
            if isinstance(update, NewTokens):
                first = not live.drawn
                live.drawn += update.token_ids
                if first:
                    self._keep(live)
            elif isinstance(update, Finished):
                del self._live[update.sequence_id]
                self._keep(live, prefilled=update.reason is FinishReason.PREFILLED)
                self._reserver.release(live.owner)
            live.stream.put(Event(update, step))

    def _keep(self, live: _Live, *, prefilled: bool = False) -> None:
        """Puts the sequence's full pages into the prefix cache, as far as they are written."""
        chain, sequence = live.chain, live.sequence
        if chain is None:
            return
        written = sequence.target if prefilled else live.written
        if written > chain.tokens:
            chain.extend((*sequence.token_ids, *live.drawn)[chain.tokens : written])
        if written // chain.page_size > live.kept:
            live.kept = self._reserver.keep(chain, sequence.pages, written)
