"""One model process as its worker has it: started, asked, watched, ended."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from baton_engine.errors import EngineDied, EngineStartFailed
from baton_engine.link import Link
from baton_engine.messages import AgentLost, EngineSpec, FromModel, Loading, ToModel

logger = logging.getLogger(__name__)

MODEL_PROCESS: tuple[str, ...] = (sys.executable, "-m", "baton_engine.model_process")

# After the first sign that the process ended (its exit, or the end of its socket) the other is awaited this long: a
# killed process shows both within a millisecond, and together they make the better message.
_SECOND_SIGN_S = 0.1
# Lines of the child's stderr that an error quotes.
_STDERR_LINES = 8


class RankProcess:
    """One rank's process. Made by `start`; nothing is loaded yet.

    `exited`: a future that resolves to the EngineDied that says how the process ended, as soon as it exits or closes
    its socket; it never holds an exception.
    """

    exited: asyncio.Future[EngineDied]

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process, link: Link) -> None:
        self.spec = spec
        self.exited = asyncio.get_running_loop().create_future()
        self._process = process
        self._link = link
        self._stopping = False
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._stderr_task = asyncio.create_task(self._pass_stderr_on())
        self._watch_task = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        group_fd: int | None,
        on_progress: Callable[[Loading], None] | None,
        on_agent_lost: Callable[[AgentLost], None] | None,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
    ) -> RankProcess:
        """`group_fd`: memory that the engine's ranks share, if there are several. The process dies with the thread that
        called this. Raises EngineStartFailed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        child_environment = dict(os.environ if environment is None else environment)
        # Both are read while torch is being imported, so that setting them there is too late.
        child_environment["OMP_NUM_THREADS"] = child_environment["MKL_NUM_THREADS"] = str(spec.threads)
        fds = {"--fd": theirs.fileno(), **({} if group_fd is None else {"--group": group_fd})}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *(word for option, fd in fds.items() for word in (option, str(fd))),
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=tuple(fds.values()),
                env=child_environment,
            )
        except OSError as error:
            ours.close()
            raise EngineStartFailed(f"cannot run {command[0]}: {error}", cause="EXEC_FAILED") from error
        finally:
            theirs.close()
        link = Link(on_progress, on_agent_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        return cls(spec, process, link)

    def send(self, message: ToModel) -> asyncio.Future[FromModel]:
        """Sends a question and returns its answer to be; nobody answers once the process has `exited`."""
        return self._link.send(message)

    async def stop(self, grace_s: float) -> None:
        """Ends the process: closes its socket, waits `grace_s` seconds for it to leave, then kills it. Idempotent."""
        self._stopping = True
        self._link.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            self.kill()
        await asyncio.gather(self._watch_task, self._stderr_task)

    def kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("model process %d had already gone", self._process.pid)

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
        died = EngineDied(f"{self._name} {how}", pid=self._process.pid, exit_code=code)
        if self._stderr and not self._stopping:
            died.fields["stderr"] = "\n".join(self._stderr)
        if not self.exited.done():
            self.exited.set_result(died)
        if not self._stopping:
            logger.error("%s", died)
        # A process that closed its socket has nobody to listen to; it must not keep its memory.
        self.kill()
        self._link.close()
        await exit_

    @property
    def _name(self) -> str:
        which = f" of rank {self.spec.rank}" if self.spec.ranks > 1 else ""
        return f"model process {self._process.pid}{which}"

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
            logger.warning("%s (%s): %s", self._name, self.spec.role, text)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
