"""Runs one service in this process."""

import importlib
import logging
import os
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from baton_actors import hold_stop_signals
from baton_cli.parent import end_with_parent
from baton_config import ConfigError, ConfigProblem, Settings
from baton_telemetry import configure_logging

logger = logging.getLogger(__name__)

Run = Callable[[Settings], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Service:
    """``module`` has ``async def run(settings)``; it is imported only in the process that runs it."""

    module: str
    section: str

    def load(self) -> Run:
        run: Run = importlib.import_module(self.module).run
        return run


SERVICES = {
    "gateway": Service("baton_gateway.main", "gateway"),
    "prefill-worker": Service("baton_prefill.main", "prefill"),
    "decode-worker": Service("baton_decode.main", "decode"),
    "transfer-agent": Service("baton_agent.main", "agent"),
}


def run_service(command: str, settings: Settings, parent: int | None = None) -> None:
    """Returns after a clean shutdown, even one asked for before it serves; raises what the service failed of."""
    hold_stop_signals()
    service = SERVICES[command]
    options = getattr(settings, service.section)
    name = getattr(options, "worker_id", None) or service.section
    configure_logging(name, settings.telemetry.log_format, settings.telemetry.log_level)
    if parent is not None:
        end_with_parent(parent, settings.cluster.stop_timeout_s)
    if options.cpus:
        _bind(service.section, options.cpus)
    _make_directories(settings, command)
    uvloop.run(service.load()(settings))


def _bind(section: str, cpus: Collection[int]) -> None:
    """Raises ConfigError if none of these CPUs may be used."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        problem = f"none of them is there to be used; there are {usable}"
        raise ConfigError([ConfigProblem(f"{section}.cpus", problem, ", ".join(map(str, cpus)))]) from error


def _make_directories(settings: Settings, command: str) -> None:
    if command == "transfer-agent":
        for path in (settings.agent.socket.removeprefix("unix:"), str(settings.agent.handoff)):
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
