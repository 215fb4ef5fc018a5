"""A worker's side of its model process. asyncio; imports no torch."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from baton_engine.errors import AttachFailed, EngineDied, EngineError, EngineStartFailed, StepFailedError
from baton_engine.link import Link
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
)

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

MODEL_PROCESS: tuple[str, ...] = (sys.executable, "-m", "baton_engine.model_process")

# After the first sign that the process ended (its exit, or the end of its socket) the other is awaited this long: a
# killed process shows both within a millisecond, and together they make the better message.
_SECOND_SIGN_S = 0.1
# Lines of the child's stderr that an error quotes.
_STDERR_LINES = 8


class EngineClient:
    """One model process. Made by `start`; every call raises EngineDied once the process is gone.

    `info`: what was loaded. `exited`: a future that resolves to the EngineDied that says how the process ended, as
    soon as it exits or closes its socket; it never holds an exception. Calls are answered in order; of `step` and
    `attach` one may wait at a time.
    """

    info: EngineInfo
    exited: asyncio.Future[EngineDied]

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process, link: Link) -> None:
        self.spec = spec
        self.exited = asyncio.get_running_loop().create_future()
        self._process = process
        self._link = link
        self._stopping = False
        self._stepping = False
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._stderr_task = asyncio.create_task(self._pass_stderr_on())
        self._watch_task = asyncio.create_task(self._watch())

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
        """Starts a model process and waits until its model is loaded, at most `timeout_s` seconds.

        The process dies with the thread that called this. `on_agent_lost` is called, in the event loop, whenever the
        agent of the last `attach` is gone. Raises EngineStartFailed; the process is gone then.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        child_environment = dict(os.environ if environment is None else environment)
        # Both are read while torch is being imported, so that setting them there is too late.
        child_environment["OMP_NUM_THREADS"] = child_environment["MKL_NUM_THREADS"] = str(spec.threads)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment,
            )
        except OSError as error:
            ours.close()
            raise EngineStartFailed(f"cannot run {command[0]}: {error}", cause="EXEC_FAILED") from error
        finally:
            theirs.close()
        link = Link(on_progress, on_agent_lost)
        await loop.create_unix_connection(lambda: link, sock=ours)
        client = cls(spec, process, link)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await client._ask(Load(spec))
        except EngineDied as died:
            await client.stop(grace_s=0.0)
            raise EngineStartFailed(
                f"the model process ended while loading {spec.model_path}: {died}", cause=died.reason
            ) from died
        except TimeoutError as error:
            await client.stop(grace_s=0.0)
            raise EngineStartFailed(
                f"{spec.model_path} was not loaded within {timeout_s:.0f} s", cause="TIMEOUT"
            ) from error
        except BaseException:
            await client.stop(grace_s=0.0)
            raise
        if isinstance(answer, LoadFailed):
            await client.stop()
            failed = EngineStartFailed(f"the model was not loaded: {answer.message}", cause=answer.reason)
            failed.status = answer.status
            raise failed
        client.info = _expect(Ready, answer).info
        return client

    async def attach(self, handoff_path: str, session: int, *, timeout_s: float = 30.0) -> None:
        """Has the process hand its cache and layer counter to the agent on the unix socket `handoff_path`.

        Replaces a former agent. Waits for a step in flight. Raises AttachFailed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(Attach(handoff_path, session))
        except TimeoutError as error:
            raise AttachFailed(
                f"no answer within {timeout_s:.0f} s to handing memory to {handoff_path}",
                cause="TIMEOUT",
                session=session,
            ) from error
        if isinstance(answer, AttachRefused):
            raise AttachFailed(answer.message, cause=answer.reason, session=session)
        _expect(Attached, answer)

    async def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises StepFailedError (its text says what to do about transfers), EngineError if one runs.

        Cancelling the call does not stop the step, and its result is lost: only for an engine that is to be stopped.
        """
        if self._stepping:
            raise EngineError(f"step {plan.step} while another is in flight; at most one may be", step=plan.step)
        self._stepping = True
        try:
            answer = await self._ask(plan)
        finally:
            self._stepping = False
        if isinstance(answer, StepFailed):
            raise StepFailedError(f"step {answer.step} failed: {answer.message}", step=answer.step, cause=answer.reason)
        return _expect(StepResult, answer)

    async def inspect(self) -> Inspection:
        """What the process says about itself."""
        return _expect(Inspection, await self._ask(Inspect()))

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Ends the process: closes its socket, waits `grace_s` seconds for it to leave, then kills it. Idempotent."""
        self._stopping = True
        self._link.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        finally:
            self._kill()
        await asyncio.gather(self._watch_task, self._stderr_task)

    async def _ask(self, message: Load | StepPlan | Attach | Inspect) -> FromModel:
        if self.exited.done():
            raise _copy(self.exited.result())
        answer = self._link.send(message)
        await asyncio.wait((answer, self.exited), return_when=asyncio.FIRST_COMPLETED)
        # An answer that came before the end counts.
        if answer.done():
            return answer.result()
        raise _copy(self.exited.result())

    async def _watch(self) -> None:
        exit_ = asyncio.create_task(self._process.wait())
        signs: set[asyncio.Future[object]] = {exit_, self._link.ended}  # type: ignore[arg-type]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(signs, timeout=_SECOND_SIGN_S)
        code = self._process.returncode
        how = "closed its socket" if code is None else _describe_exit(code)
        if self._stopping:
            how = f"was stopped ({how})"
        elif self._link.ended.done() and self._link.ended.result():
            how = f"{how}: {self._link.ended.result()}"
        if code is not None and not self._stopping:
            await asyncio.wait((self._stderr_task,), timeout=_SECOND_SIGN_S)
        died = EngineDied(f"model process {self._process.pid} {how}", pid=self._process.pid, exit_code=code)
        if self._stderr and not self._stopping:
            died.fields["stderr"] = "\n".join(self._stderr)
        if not self.exited.done():
            self.exited.set_result(died)
        if not self._stopping:
            logger.error("%s", died)
        # A process that closed its socket has nobody to listen to; it must not keep its memory.
        self._kill()
        self._link.close()
        await exit_

    async def _pass_stderr_on(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line beyond the stream's limit; the rest of it follows as lines of their own
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            logger.warning("model process %d (%s): %s", self._process.pid, self.spec.role, text)

    def _kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("model process %d had already gone", self._process.pid)


def _expect(kind: type[_T], answer: FromModel) -> _T:
    if not isinstance(answer, kind):
        raise EngineError(f"the model process answered {type(answer).__name__}; expected {kind.__name__}")
    return answer


def _copy(died: EngineDied) -> EngineDied:
    """A fresh exception for every raise: one that is raised twice would collect the tracebacks of both."""
    fresh = EngineDied(str(died))
    fresh.fields = dict(died.fields)
    return fresh


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
