"""A worker's side of an engine: the model processes of its ranks, as one. asyncio; imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton_engine.errors import AttachFailed, EngineDied, EngineError, EngineStartFailed, StepFailedError
from baton_engine.group_memory import open_group
from baton_engine.messages import (
    AgentLost,
    Attach,
    Attached,
    AttachRefused,
    EngineInfo,
    EngineSpec,
    FromModel,
    Inspect,
    Inspection,
    Load,
    LoadFailed,
    Loading,
    Ready,
    StepFailed,
    StepPlan,
    StepResult,
    ToModel,
)
from baton_engine.rank_process import MODEL_PROCESS, RankProcess
from baton_engine.ranks import rank_specs
from baton_memory import mapping_seconds

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Once a step is over for rank 0, or has failed on any rank, the others leave it within milliseconds: whoever still
# computes learns of it at its next sum. A rank that has not by then never will.
_STRAGGLER_S = 10.0
# A failure that only follows from another rank's.
_CONSEQUENCE = "MODEL_GROUP_BROKEN"


class EngineClient:
    """One engine. Made by `start`; every call raises EngineDied once one of its processes is gone, and with it all.

    All ranks get the same messages and answer each; rank 0 leads: it draws the tokens, and its layer counter is the
    engine's. `info`: what was loaded, as rank 0 says. `exited`: a future that resolves to the EngineDied that says how
    the first process ended; it never holds an exception. Calls are answered in order; of `step` and `attach` one may
    wait at a time.
    """

    info: EngineInfo
    exited: asyncio.Future[EngineDied]

    def __init__(self, spec: EngineSpec, ranks: Sequence[RankProcess]) -> None:
        self.spec = spec
        self.exited = asyncio.get_running_loop().create_future()
        self._ranks = ranks
        self._stepping = False
        for rank in ranks:
            rank.exited.add_done_callback(self._rank_exited)

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        on_progress: Callable[[Loading], None] | None = None,
        on_agent_lost: Callable[[AgentLost], None] | None = None,
        timeout_s: float = 120.0,
        command: Sequence[str] = MODEL_PROCESS,
        environment: Mapping[str, str] | None = None,
    ) -> EngineClient:
        """Starts a model process for each rank and waits until the model is loaded, at most `timeout_s` seconds.

        The processes die with the thread that called this. `on_agent_lost` is called, in the event loop, whenever a
        rank's agent of the last `attach` is gone. `on_progress` hears of rank 0. Raises EngineStartFailed; the
        processes are gone then.
        """
        ranks: list[RankProcess] = []
        with contextlib.ExitStack() as stack:
            group_fd = stack.enter_context(open_group(spec))
            try:
                for each in rank_specs(spec):
                    ranks.append(  # noqa: PERF401 - one by one: if one does not start, the others are ended
                        await RankProcess.start(
                            each,
                            group_fd=group_fd,
                            on_progress=on_progress if each.rank == 0 else None,
                            on_agent_lost=on_agent_lost,
                            command=command,
                            environment=environment,
                        )
                    )
            except BaseException:
                await asyncio.gather(*(rank.stop(0.0) for rank in ranks))
                raise
        client = cls(spec, ranks)
        try:
            await client._load(timeout_s)
        except BaseException:
            await client.stop(grace_s=0.0)
            raise
        return client

    async def _load(self, timeout_s: float) -> None:
        path = self.spec.model_path
        answers = [rank.send(Load(rank.spec)) for rank in self._ranks]
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_loaded(answers)
        except EngineDied as died:
            raise EngineStartFailed(
                f"the model process ended while loading {path}: {died}", cause=died.reason
            ) from died
        except TimeoutError as error:
            raise EngineStartFailed(f"{path} was not loaded within {timeout_s:.0f} s", cause="TIMEOUT") from error
        infos = [_expect(Ready, answer.result()).info for answer in answers]
        self.info = infos[0]
        for rank, info in enumerate(infos):
            if (info.fingerprint, info.pages) != (self.info.fingerprint, self.info.pages):
                raise EngineStartFailed(
                    f"rank {rank} loaded {info.fingerprint} with {info.pages} pages, rank 0 {self.info.fingerprint} "
                    f"with {self.info.pages}",
                    cause="RANKS_DIFFER",
                )

    async def _until_loaded(self, answers: Sequence[asyncio.Future[FromModel]]) -> None:
        """The first that fails counts: the others wait for it, and never answer."""
        pending = list(answers)
        while pending:
            signs: list[asyncio.Future[Any]] = [*pending, self.exited]
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            for answer in pending:
                if answer.done() and isinstance(failed := answer.result(), LoadFailed):
                    error = EngineStartFailed(f"the model was not loaded: {failed.message}", cause=failed.reason)
                    error.status = failed.status
                    raise error
            pending = [answer for answer in pending if not answer.done()]
            if pending and self.exited.done():
                raise _copy(self.exited.result())

    async def attach(self, handoff_path: str, session: int, *, timeout_s: float = 30.0) -> None:
        """Has every rank hand its cache and layer counter to the agent on the unix socket `handoff_path`.

        Replaces a former agent. Waits for a step in flight, at most `timeout_s` seconds and as long as agents may take
        to map the cache. Raises AttachFailed; ranks that did attach stay so until the next call.
        """
        timeout_s += mapping_seconds(self.info.layers * self.info.pages * self.info.page_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._ask_all(Attach(handoff_path, session))
        except TimeoutError as error:
            raise AttachFailed(
                f"no answer within {timeout_s:.0f} s to handing memory to {handoff_path}",
                cause="TIMEOUT",
                session=session,
            ) from error
        for answer in answers:
            if isinstance(answer, AttachRefused):
                raise AttachFailed(answer.message, cause=answer.reason, session=session)
            _expect(Attached, answer)

    async def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises StepFailedError (its text says what to do about transfers), EngineError if one runs.

        Returns when every rank has left the step. Cancelling the call does not stop the step, and its result is lost:
        only for an engine that is to be stopped.
        """
        if self._stepping:
            raise EngineError(f"step {plan.step} while another is in flight; at most one may be", step=plan.step)
        self._stepping = True
        try:
            answers = await self._ask_all(plan, straggler_s=_STRAGGLER_S)
        finally:
            self._stepping = False
        failures = [answer for answer in answers if isinstance(answer, StepFailed)]
        if failures:
            cause = min(failures, key=lambda failure: failure.reason == _CONSEQUENCE)
            raise StepFailedError(f"step {cause.step} failed: {cause.message}", step=cause.step, cause=cause.reason)
        return _expect(StepResult, answers[0])

    async def inspect(self, rank: int = 0) -> Inspection:
        """What a rank's process says about itself."""
        return _expect(Inspection, await self._answer(self._send(self._ranks[rank], Inspect())))

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Ends the processes: closes their sockets, waits `grace_s` seconds for them to leave, then kills them.
        Idempotent."""
        await asyncio.gather(*(rank.stop(grace_s) for rank in self._ranks))

    def _rank_exited(self, exited: asyncio.Future[EngineDied]) -> None:
        if not self.exited.done():
            self.exited.set_result(exited.result())
        # What the others have is of no use without this one's part.
        for rank in self._ranks:
            if not rank.exited.done():
                rank.kill()

    def _send(self, rank: RankProcess, message: ToModel) -> asyncio.Future[FromModel]:
        if self.exited.done():
            raise _copy(self.exited.result())
        return rank.send(message)

    async def _answer(self, answer: asyncio.Future[FromModel]) -> FromModel:
        await asyncio.wait((answer, self.exited), return_when=asyncio.FIRST_COMPLETED)
        # An answer that came before the end counts.
        if answer.done():
            return answer.result()
        raise _copy(self.exited.result())

    async def _ask_all(self, message: StepPlan | Attach, straggler_s: float | None = None) -> list[FromModel]:
        """Every rank's answer, in order of rank.

        `straggler_s`: once rank 0 has answered, or any rank with a failure, a rank that takes longer is stuck, and is
        killed.
        """
        answers = [self._send(rank, message) for rank in self._ranks]
        if len(answers) == 1:
            return [await self._answer(answers[0])]
        loop = asyncio.get_running_loop()
        complete: asyncio.Future[None] = loop.create_future()
        waiting = len(answers)
        limit: asyncio.TimerHandle | None = None

        def answered(answer: asyncio.Future[FromModel]) -> None:
            nonlocal waiting, limit
            waiting -= 1
            if waiting == 0 and not complete.done():
                complete.set_result(None)
            is_over = answer is answers[0] or isinstance(answer.result(), StepFailed)
            if straggler_s is not None and limit is None and waiting and is_over:
                limit = loop.call_later(straggler_s, self._kill_stragglers, answers)

        for answer in answers:
            answer.add_done_callback(answered)
        try:
            await asyncio.wait((complete, self.exited), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if limit is not None:
                limit.cancel()
        if not complete.done():
            raise _copy(self.exited.result())
        return [answer.result() for answer in answers]

    def _kill_stragglers(self, answers: Sequence[asyncio.Future[FromModel]]) -> None:
        for rank, answer in zip(self._ranks, answers, strict=True):
            if not answer.done():
                logger.error("rank %d does not leave a step that is over: killing it", rank.spec.rank)
                rank.kill()


def _expect(kind: type[_T], answer: FromModel) -> _T:
    if not isinstance(answer, kind):
        raise EngineError(f"the model process answered {type(answer).__name__}; expected {kind.__name__}")
    return answer


def _copy(died: EngineDied) -> EngineDied:
    """A fresh exception for every raise: one that is raised twice would collect the tracebacks of both."""
    fresh = EngineDied(str(died))
    fresh.fields = dict(died.fields)
    return fresh
