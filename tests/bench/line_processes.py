"""Processes that are told by lines what to measure: the bare libfabric loop (native/bare_loop.cpp), other engines."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cores import place_pair

SOURCE = Path(__file__).parent / "native" / "bare_loop.cpp"
BUILD = Path(__file__).parents[2] / "build" / "bench"
DEADLINE_S = 120.0

Offsets = Sequence[tuple[int, int]]
"""(offset in the source pool, offset in the destination pool) of each write."""


class Pool(NamedTuple):
    """Memory that a process maps: a memfd and how much of it."""

    fd: int
    length: int


def compiled(source: Path, *flags: str) -> Path:
    """The program (or library) of one C++ file, built if it is older than its source."""
    target = BUILD / source.stem
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run(["g++", "-std=c++20", "-O2", "-o", str(target), str(source), *flags], check=True)
    return target


def bare_loop() -> Path:
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "libfabric"], check=True, capture_output=True, text=True
    ).stdout
    return compiled(SOURCE, *shlex.split(flags))


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, to the nanosecond where /proc has ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)


class LineProcess:
    """A command a line, an answer a line; the first says who it is."""

    def __init__(self, *arguments: object, pools: Sequence[Pool], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[pool.fd for pool in pools],
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self.identity = self.answer().split()[1:]

    def command(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait(DEADLINE_S)}")
        return line.strip()

    def call(self, line: str) -> str:
        self.command(line)
        return self.answer()

    def load(self, length: int, writes: Offsets) -> None:
        lines = [f"load {length} {len(writes)}", *(f"{source} {destination}" for source, destination in writes)]
        self.call("\n".join(lines))

    def span(self, line: str) -> float:
        """Seconds between the two times that a command answers with."""
        begin, end = map(int, self.call(line).split())
        return (end - begin) / 1e9

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()


class Run(NamedTuple):
    """Seconds from the first post until the receiver saw the last immediate, and CPU seconds of both sides."""

    seconds: float
    cpu: float


class LinePair:
    """Sender and receiver, a pool and half of the cores each."""

    def __init__(self, sender: LineProcess, receiver: LineProcess) -> None:
        self.sender = sender
        self.receiver = receiver
        place_pair(sender.pid, receiver.pid)
        self.sender.call("connect " + " ".join(self.receiver.identity))

    def run(self, length: int, writes: Offsets, *, wait: bool) -> Run:
        """`wait`: block on the queues where they are empty, as the agent does; otherwise poll without end."""
        self.sender.load(length, writes)
        before = self._cpu()
        self.receiver.call(f"receive {len(writes)} {int(wait)}")
        begin, sent = map(int, self.sender.call(f"send {int(wait)}").split())
        _, seen = map(int, self.receiver.answer().split())
        # 0 from a receiver that hears nothing.
        return Run(((seen or sent) - begin) / 1e9, self._cpu() - before)

    def _cpu(self) -> float:
        return cpu_seconds(self.sender.pid) + cpu_seconds(self.receiver.pid)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@contextmanager
def bare_pair(provider: str, node: str, window: int, source: Pool, destination: Pool) -> Iterator[LinePair]:
    program = bare_loop(), "fabric", provider, node, window
    pair = LinePair(
        LineProcess(*program, *source, pools=[source]), LineProcess(*program, *destination, pools=[destination])
    )
    try:
        yield pair
    finally:
        pair.close()


@contextmanager
def copier(source: Pool, destination: Pool) -> Iterator[LineProcess]:
    """A process with a memcpy loop from one pool into the other."""
    process = LineProcess(bare_loop(), "copy", *source, *destination, pools=[source, destination])
    try:
        yield process
    finally:
        process.close()
