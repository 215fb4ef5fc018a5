"""Every service of the command line ends well whenever it is told to, also before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton_cli.service import SERVICES
from cluster import free_port
from fabric_harness import wait_until

SECONDS = 60.0
SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


@contextmanager
def starting(command: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    registry = f"127.0.0.1:{free_port()}"
    settings = {
        "agent.socket": f"unix:{directory}/a.sock",
        "agent.handoff": f"{directory}/h.sock",
        "agent.control": "127.0.0.1:0",
        "agent.metrics": "",
        "cluster.registry": registry,
        "gateway.registry": registry,
        "gateway.http": "127.0.0.1:0",
        "gateway.grpc": "127.0.0.1:0",
        "prefill.listen": "127.0.0.1:0",
        "prefill.metrics": "",
        "decode.listen": "127.0.0.1:0",
        "decode.metrics": "",
    }
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "baton_cli.main", command, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def held(process: subprocess.Popen[str]) -> bool:
    """The service's run has begun: signals wait until it can end well."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigBlk:")[1].split()[0], 16) & SIGTERM_BIT)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


@pytest.mark.parametrize("command", SERVICES)
def test_a_service_that_is_told_to_end_before_it_serves_ends_well(command: str, tmp_path: Path) -> None:
    with starting(command, tmp_path) as process:
        wait_until(lambda: held(process), "the service's run begins", SECONDS)
        process.send_signal(signal.SIGTERM)
        status, output = ended(process)
        assert status == 0, output
        assert "SIGTERM: shutting down" in output


def test_an_agent_that_is_told_to_end_while_libfabric_initialises_ends_well(tmp_path: Path) -> None:
    """The library installs handlers of its own then, some of which end the process with status 1, or hang."""
    with starting("transfer-agent", tmp_path) as process:
        wait_until(lambda: "libfabric" in Path(f"/proc/{process.pid}/maps").read_text(), "libfabric is loaded", SECONDS)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    assert not (tmp_path / "a.sock").exists()
