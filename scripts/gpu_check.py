#!/usr/bin/env python3
"""What of Baton needs a GPU, tried on one: `make gpu-check`. Ends after five minutes in any case.

Each check runs in a process of its own, so that one that crashes or hangs leaves the others alone. FlashInfer compiles
its kernels when they are first used, which takes nvcc and minutes; that is done side by side with the first checks, and
is kept: a second run is faster.

Exit status: 0 all that must work does, 1 something does not, 77 there is no GPU here.

    python scripts/gpu_check.py [--device N] [--only NAME ...] [--list]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gpu_models
from gpu_driver import DRIVER_CHECKS, describe, importer, receiver
from gpu_models import Failed, Rig, Skipped

from baton_fabric.errors import FabricError
from baton_memory.cuda import Device, NoGpu, open_driver
from baton_memory.errors import SharedMemoryError
from baton_model.errors import ModelError

NO_GPU = 77
# Of everything; of one check; and of compiling, which comes first and has no use without time for the rest.
LIMIT_S = 295.0
CHECK_S = 60.0
COMPILE_S = 170.0
# Of what a check says that are shown, the last.
LINES = 30
# How the process of a check ends.
OK, FAILED, SKIPPED = 0, 1, 3
VERDICTS = {OK: "ok", FAILED: "FAILED", SKIPPED: "skipped"}

MODEL_CHECKS: dict[str, Callable[[Rig], str]] = {
    "norms and activations": gpu_models.check_operators,
    "sampling": gpu_models.check_sampler,
    "attention over pages": gpu_models.check_attention,
    "latent attention over pages": gpu_models.check_latent_attention,
    "models of every family": gpu_models.check_families,
    "decodes in CUDA graphs": gpu_models.check_graphs,
    "layer counter seen while a graph runs": gpu_models.check_counter_is_seen_layer_by_layer,
    "ranks over NCCL": gpu_models.check_ranks,
    "speed": gpu_models.check_speed,
}
# These use every kernel there is: running them is what compiles.
COMPILING = ("norms and activations", "sampling", "attention over pages", "latent attention over pages")
CHECKS = (*DRIVER_CHECKS, *MODEL_CHECKS)
# Seconds, of those that may take more or less than CHECK_S.
LIMITS = {"speed": 100.0}


def run_here(name: str, ordinal: int, program: str, api: Any, rig: Rig | None) -> int:
    """One check, in this process: its detail goes to the output, its verdict is the result."""
    try:
        if name in MODEL_CHECKS:
            detail = MODEL_CHECKS[name](rig or gpu_models.cuda_rig(ordinal))
        else:
            with closing(Device(open_driver(api), ordinal)) as device:
                detail = DRIVER_CHECKS[name](device, program)
    except Skipped as reason:
        print(reason)
        return SKIPPED
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        if not isinstance(error, (Failed, FabricError, SharedMemoryError, ModelError)):
            # What nobody foresaw is only understood by where it happened.
            traceback.print_exc(file=sys.stdout)
        return FAILED
    print(detail)
    return OK


class Running:
    """A check in a process of its own. It and all that it started are gone when `result` has returned."""

    def __init__(self, name: str, ordinal: int, program: str, limit_s: float, output: Path) -> None:
        self._start = time.monotonic()
        self._limit_s = limit_s
        self._output = output
        with output.open("w") as file:
            self._child = subprocess.Popen(
                [sys.executable, program, "--device", str(ordinal), "--run", name],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def result(self) -> tuple[int, float, str]:
        """Verdict, seconds, detail."""
        why = ""
        try:
            status = self._child.wait(max(self._start + self._limit_s - time.monotonic(), 0.1))
            if status not in VERDICTS:
                status, why = FAILED, f"the process ended with {status}"
        except subprocess.TimeoutExpired:
            status, why = FAILED, f"no end after {time.monotonic() - self._start:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        lines = [*self._output.read_text(errors="replace").strip().splitlines()[-LINES:], why]
        return status, time.monotonic() - self._start, "\n".join(filter(None, lines))


class Compiling:
    """Runs what uses every kernel. Only what is left on disk counts: whether they are right is found out later."""

    def __init__(self, ordinal: int, program: str, limit_s: float, directory: Path) -> None:
        self._start = time.monotonic()
        self._running = [
            Running(name, ordinal, program, limit_s, directory / f"compile-{number}")
            for number, name in enumerate(COMPILING)
        ]

    def wait(self) -> None:
        """Idempotent."""
        while self._running:
            self._running.pop().result()
            if not self._running:
                took = time.monotonic() - self._start
                print(f"kernels compiled, or found compiled, within {took:.1f} s", flush=True)


def run_all(names: Sequence[str], ordinal: int, program: str, deadline: float, directory: Path) -> int:
    """`directory`: for what the checks say. Memory and fabric come first in `CHECKS`: kernels compile meanwhile."""
    verdicts: dict[str, tuple[int, float]] = {}
    compiling = (
        Compiling(ordinal, program, COMPILE_S, directory) if any(name in MODEL_CHECKS for name in names) else None
    )
    for number, name in enumerate(names):
        if compiling is not None and name in MODEL_CHECKS:
            compiling.wait()
        left = deadline - time.monotonic()
        if left < 1:
            status, took, detail = FAILED, 0.0, "no time was left; what was compiled is kept: run it again"
        else:
            check = Running(name, ordinal, program, min(LIMITS.get(name, CHECK_S), left), directory / str(number))
            status, took, detail = check.result()
        verdicts[name] = status, took
        print(f"{VERDICTS[status]:8s}{name} ({took:.1f} s)")
        print("\n".join(f"    {line}" for line in detail.splitlines()), flush=True)
    print("\n" + "\n".join(f"{VERDICTS[status]:8s}{took:6.1f} s  {name}" for name, (status, took) in verdicts.items()))
    counts = {verdict: sum(status == verdict for status, _ in verdicts.values()) for verdict in VERDICTS}
    print(f"{counts[OK]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped")
    return FAILED if counts[FAILED] else OK


def main(
    arguments: list[str], program: str = str(Path(__file__).resolve()), api: Any = None, rig: Rig | None = None
) -> int:
    """`program`: what the other processes run; `api`, `rig`: something in the place of cuda-bindings and of a GPU."""
    deadline = time.monotonic() + LIMIT_S
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="the GPU's ordinal")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help="these checks, by name")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--importer", help=argparse.SUPPRESS)
    parser.add_argument("--receiver", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(CHECKS))
        return OK
    # A call of a driver that hangs can't be interrupted otherwise.
    signal.alarm(round(LIMIT_S) + 5)
    if options.importer is not None:
        asyncio.run(importer(options.importer, api))
        return OK
    if options.receiver is not None:
        receiver(options.receiver, api)
        return OK
    if options.run is not None:
        return run_here(options.run, options.device, program, api, rig)
    try:
        driver = open_driver(api)
    except NoGpu as error:
        print(f"no GPU here: {error}")
        return NO_GPU
    with closing(Device(driver, options.device)) as device:
        print(describe(driver, device), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        return run_all(options.only or CHECKS, options.device, program, deadline, Path(directory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
