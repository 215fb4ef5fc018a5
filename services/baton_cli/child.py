"""A service as a child process."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from baton_cli.plan import ServicePlan
from baton_cli.probe import wait_until_serving
from baton_config.render import to_toml

logger = logging.getLogger(__name__)

TAIL_LINES = 15

# What runs a service, given its subcommand and options.
PROGRAM = (sys.executable, "-m", "baton_cli.main")


class ServiceFailedError(Exception):
    """A child process did not start, or ended by itself."""

    status = "UNAVAILABLE"
    reason = "SERVICE_FAILED"

    def __init__(self, name: str, problem: str, log: Path) -> None:
        tail = last_lines(log)
        lines = f"; the end of {log}:\n{tail}" if tail else f"; its log {log} is empty"
        super().__init__(f"{name} {problem}{lines}")
        self.name, self.problem = name, problem
        self.fields = {"service": name, "log": str(log)}


class ServiceProcess:
    """Runs one planned service; a `baton_actors.Child`. ``on_state`` is told "starting", "ready" and "stopped"."""

    def __init__(
        self,
        plan: ServicePlan,
        run_directory: Path,
        on_state: Callable[["ServiceProcess", str], None],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.plan = plan
        self._program = program
        self.log = run_directory / f"{plan.name}.log"
        self._config = run_directory / f"{plan.name}.toml"
        self._on_state = on_state
        self._process: asyncio.subprocess.Process | None = None
        self._started = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when the service says that it serves. Raises ServiceFailedError."""
        self._config.write_text(to_toml(self.plan.settings))
        self._config.chmod(0o600)
        self._on_state(self, "starting")
        self._started = time.time()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*self._program, self.plan.command),
                *("--config", str(self._config), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the supervisor alone, and the group is swept at the end
            )
        try:
            await self._until_ready(self._process)
        except BaseException:
            await self.stop()
            raise
        self._on_state(self, "ready")

    async def join(self) -> None:
        """Until the process ends; that it ended by itself is a failure, whatever its exit status."""
        if self._process is None:
            return
        code = await self._process.wait()
        self._sweep()
        raise ServiceFailedError(self.plan.name, _ending(code), self.log)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after cluster.stop_timeout_s. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.plan.settings.cluster.stop_timeout_s):
                    await process.wait()
            except TimeoutError:
                logger.warning("%s does not end: killing it", self.plan.name)
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self._sweep()
        self._on_state(self, "stopped")

    def _sweep(self) -> None:
        """Removes what the service may have left: of its process group, such as a model process, and of its memory."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            remove_shared_memory(self._process.pid, self._started)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        limit = self.plan.settings.cluster.start_timeout_s
        serving = asyncio.ensure_future(wait_until_serving(self.plan.probe, self.plan.settings))
        ended = asyncio.ensure_future(process.wait())
        try:
            done, _ = await asyncio.wait({serving, ended}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                raise ServiceFailedError(self.plan.name, f"did not start: it {_ending(ended.result())}", self.log)
            if serving not in done:
                raise ServiceFailedError(self.plan.name, f"was not ready within {limit:g} s", self.log)
            serving.result()
        finally:
            for task in (serving, ended):
                task.cancel()
            await asyncio.gather(serving, ended, return_exceptions=True)


def remove_shared_memory(pid: int, since: float, directory: Path = Path("/dev/shm")) -> None:
    """Removes what a process that is dead left of libfabric's shm provider: 16 MiB an endpoint, under the process's id,
    which nobody else removes when an agent is killed. ``since``: seconds of the epoch; what is older was of another
    process of that id."""
    for segment in directory.glob(f"{pid}:*"):
        with suppress(OSError):
            if segment.stat().st_mtime >= since:
                segment.unlink()


def last_lines(log: Path, count: int = TAIL_LINES) -> str:
    """The last lines of a log file, indented; empty if there is none."""
    try:
        with log.open(errors="replace") as lines:
            return "".join(f"  {line}" for line in deque(lines, count)).rstrip()
    except FileNotFoundError:
        return ""


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _environment() -> dict[str, str]:
    """The child's file holds the effective configuration, so no variable may override it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
