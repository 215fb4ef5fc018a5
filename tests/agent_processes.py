"""Transfer agents and model processes as processes of their own, which a test can stop and kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from cluster import free_port
from fabric_harness import NODE, SLOWNESS, freeze

AGENT = """
import faulthandler, uvloop
from baton_agent.main import run
from baton_config import load_settings
from baton_telemetry.logs import configure
faulthandler.enable()
configure("agent")
uvloop.run(run(load_settings()))
"""
_SECONDS = {
    "heartbeat_s": 0.1,
    "heartbeat_timeout_s": 0.3,
    "stop_timeout_s": 1.0,
    "drain_timeout_s": 0.7,
    "post_timeout_s": 1.0,
    "shutdown_timeout_s": 4.0,
}
FAST = {"heartbeat_misses": "3", **{name: str(value * SLOWNESS) for name, value in _SECONDS.items()}}


class Agent:
    """One agent. Restarting it keeps its sockets and its control address."""

    def __init__(self, directory: Path, name: str, transport: str, **settings: str) -> None:
        self.target = f"unix:{directory}/{name}.sock"
        self.handoff = f"{directory}/{name}.ho"
        self.log = directory / f"{name}.log"
        options = {
            "socket": self.target,
            "handoff": self.handoff,
            "control": f"127.0.0.1:{free_port()}",
            "metrics": "",
            "transport": transport,
            "node": NODE,
            **FAST,
            **settings,
        }
        self.environment = {f"BATON_AGENT__{name.upper()}": value for name, value in options.items()}
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AGENT],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """See fabric_harness."""
        freeze(self.pid)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 10.0) -> int:
        """SIGTERM -> exit status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def mappings(self) -> int:
        """Handed-over memory that is mapped."""
        return Path(f"/proc/{self.pid}/maps").read_text().count("/memfd:kv")

    def modules(self) -> str:
        return Path(f"/proc/{self.pid}/maps").read_text()


class ModelProcess:
    """See agent_model_process."""

    def __init__(self, path: str, session: int, seed: int) -> None:
        script = Path(__file__).with_name("agent_model_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), path, str(session), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"attached\n"

    def advance(self, value: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{value}\n".encode())
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def agents(
    directory: Path, transport: str, *names: str, domains: Mapping[str, str] = MappingProxyType({}), **settings: str
) -> Iterator[list[Agent]]:
    """`domains`: by agent, the setting; none for one at its node."""
    started = [
        Agent(directory, name, transport, **settings, **({"domains": domains[name]} if name in domains else {}))
        for name in names
    ]
    try:
        yield started
    except BaseException:
        for agent in started:
            status = agent.process.poll() if agent.process is not None else None
            print(f"--- {agent.log.name} (status {status})\n{agent.log.read_text()[-5000:]}")
        raise
    finally:
        for agent in started:
            if agent.process is not None and agent.process.poll() is None:
                agent.stop()
