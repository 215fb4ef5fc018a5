"""Two sides of a fabric for tests, in this process or one of them in a child: memory, counter, engine, and waiting
with a deadline.

``python fabric_harness.py SOCKET_FD MEMORY_FD ...`` is the child: it serves a Side by JSON lines.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton_fabric._native import Engine
from baton_fabric.errors import FabricError
from baton_memory import LayerCounter, SharedMemory
from conditions import SLOWNESS

# The same tests run over other fabrics: providers, separated by commas, and the local address to bind to.
FABRICS = [each for each in os.environ.get("BATON_TEST_FABRICS", "").split(",") if each]
NODE = os.environ.get("BATON_TEST_NODE", "127.0.0.1")
# Of such a size that some dozens of them are in flight for a while.
LARGE_PAGE = int((1 << 20) / SLOWNESS)

DEADLINE_S = 20.0 * SLOWNESS


def fabrics(*usual: str) -> list[str]:
    """The providers that a test runs over: `usual`, unless the environment names others."""
    return FABRICS or list(usual)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    """Waits for something that no descriptor announces."""
    end = time.monotonic() + seconds
    pause = select.poll()
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        pause.poll(1)


def freeze(pid: int) -> None:
    """SIGSTOP, and until every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        os.sched_yield()


class Side:
    """One engine, one region of `layers` x `pages` x `page_bytes`, one layer counter."""

    def __init__(
        self,
        provider: str,
        memory: SharedMemory,
        layer_counter: LayerCounter,
        shape: tuple[int, int, int],
        post_timeout_ms: int,
        spin: bool = False,
        domains: Sequence[str] = (NODE,),
    ) -> None:
        self.layers, self.pages, self.page_bytes = shape
        self.memory = memory
        self.layer_counter = layer_counter
        self.bytes = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(shape)
        self.engine: Any = Engine(provider, list(domains), spin, post_timeout_ms)
        self.region, self.accesses = self.engine.register_region(memory.fd, memory.length)
        self.counter = self.engine.attach_counter(layer_counter.memory_fd, layer_counter.doorbell_fd)
        self.seen: list[Any] = []

    @property
    def key(self) -> int:
        """Of the region in the first domain."""
        return int(self.accesses[0][1])

    @property
    def remotes(self) -> list[tuple[int, int, int]]:
        """For a peer's streams into the region, over endpoints in all domains."""
        return [(number, key, base) for number, (_, key, base) in enumerate(self.accesses)]

    def fill(self, seed: int = 0) -> None:
        """No byte is 0."""
        self.bytes[:] = np.random.default_rng(seed).integers(1, 256, self.bytes.shape, dtype=np.uint8)

    def wait(self, *kinds: type[Any], count: int = 1, seconds: float = DEADLINE_S) -> list[Any]:
        """Takes the next `count` events of these kinds; others stay in `seen`."""
        return self.wait_named([kind.__name__ for kind in kinds], count, seconds)

    def wait_named(self, kinds: list[str], count: int, seconds: float) -> list[Any]:
        end = time.monotonic() + seconds
        while True:
            self.seen += self.engine.events()
            found = [event for event in self.seen if type(event).__name__ in kinds][:count]
            if len(found) == count:
                self.seen = [event for event in self.seen if not any(event is taken for taken in found)]
                return found
            left = end - time.monotonic()
            names = [type(event).__name__ for event in self.seen]
            assert left > 0, f"not within {seconds} s: {count} of {kinds}; seen {names}"
            select.select([self.engine.event_fd], [], [], left)

    def metric(self, name: str) -> int:
        return int(self.engine.metrics()[name])

    def close(self) -> None:
        self.engine.close()
        del self.bytes
        self.layer_counter.close()
        self.memory.close()


class _RemoteEngine:
    """The engine of a child process."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self._call(method, *arguments)


class RemoteSide(Side):
    """The same in a child process. Memory and counter are this process's own and shared with the child."""

    def __init__(
        self,
        provider: str,
        memory: SharedMemory,
        layer_counter: LayerCounter,
        shape: tuple[int, int, int],
        post_timeout_ms: int,
        spin: bool = False,
        domains: Sequence[str] = (NODE,),
    ) -> None:
        self.layers, self.pages, self.page_bytes = shape
        self.memory = memory
        self.layer_counter = layer_counter
        self.bytes = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(shape)
        ours, theirs = socket.socketpair()
        fds = [memory.fd, layer_counter.memory_fd, layer_counter.doorbell_fd, theirs.fileno()]
        arguments = [provider, ",".join(domains), *map(str, [*fds, *shape, post_timeout_ms, int(spin)])]
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], pass_fds=fds)
        theirs.close()
        ours.settimeout(DEADLINE_S + 10)
        self._lines = ours.makefile("rw", encoding="utf-8")
        ours.close()
        self.region, self.accesses, self.counter = self.call("identify")
        self.engine = _RemoteEngine(self.call)

    def call(self, method: str, *arguments: Any) -> Any:
        json.dump([method, arguments], self._lines, default=lambda value: {"bytes": value.hex()})
        self._lines.write("\n")
        self._lines.flush()
        kind, answer = json.loads(self._lines.readline(), object_hook=_from_json)
        if kind == "error":
            raise FabricError(*answer)
        assert kind == "result", answer
        return answer

    def wait_named(self, kinds: list[str], count: int, seconds: float) -> list[Any]:
        return [SimpleNamespace(**event) for event in self.call("wait", kinds, count, seconds)]

    def signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            freeze(self.process.pid)
        else:
            self.process.send_signal(number)

    def close(self) -> None:
        self._lines.close()
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()
            # What a killed process leaves of the shm provider.
            for left in Path("/dev/shm").glob(f"{self.process.pid}:*"):
                left.unlink(missing_ok=True)
        del self.bytes
        self.layer_counter.close()
        self.memory.close()


def _from_json(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["bytes"]) if set(value) == {"bytes"} else value


def _fields(event: Any) -> dict[str, Any]:
    simple = {name: getattr(event, name) for name in dir(event) if not name.startswith("_")}
    return {name: value if isinstance(value, int | str) else _fields(value) for name, value in simple.items()}


def _serve(side: Side, lines: Any) -> None:
    for line in lines:
        method, arguments = json.loads(line, object_hook=_from_json)
        try:
            if method == "wait":
                answer = ["result", [_fields(event) for event in side.wait_named(*arguments)]]
            elif method == "identify":
                answer = ["result", [side.region, side.accesses, side.counter]]
            else:
                answer = ["result", getattr(side.engine, method)(*arguments)]
        except FabricError as error:
            answer = ["error", [str(error), error.status, error.reason, error.fields]]
        except AssertionError as error:
            answer = ["failure", str(error)]
        json.dump(answer, lines, default=lambda value: {"bytes": value.hex()})
        lines.write("\n")
        lines.flush()


def make_side(
    provider: str,
    *,
    remote: bool = False,
    layers: int = 4,
    pages: int = 64,
    page_bytes: int = 4096,
    post_timeout_ms: int = 5000,
    spin: bool = False,
    domains: Sequence[str] = (NODE,),
) -> Any:
    kind = RemoteSide if remote else Side
    memory = SharedMemory.create("fabric-test", layers * pages * page_bytes)
    shape = (layers, pages, page_bytes)
    return kind(provider, memory, LayerCounter.create(), shape, post_timeout_ms, spin, domains)


class Pair:
    """A sender and a receiver, connected; `remote` says which is a child process.

    By default none, but with shm the receiver: it works only between two processes. `domains`: the addresses of each
    side's, one on either unless told.
    """

    def __init__(
        self,
        provider: str,
        *,
        remote: str | None = None,
        domains: tuple[Sequence[str], Sequence[str]] = ((NODE,), (NODE,)),
        **arguments: Any,
    ) -> None:
        self.provider = provider
        if remote is None and provider == "shm":
            remote = "receiver"
        self.sender = make_side(provider, remote=remote == "sender", domains=domains[0], **arguments)
        self.receiver = make_side(provider, remote=remote == "receiver", domains=domains[1], **arguments)
        self.connect()
        self._transfers = 0
        self._slots = 0

    def connect(self) -> None:
        """With endpoints that were not used before."""
        self.endpoint, addresses = self.receiver.engine.open_endpoint()
        self.peer = self.sender.engine.connect(addresses)

    def stream(self, *extents: tuple[int, int, int]) -> tuple[Any, ...]:
        """Whole pages unless told otherwise."""
        sender, receiver = self.sender, self.receiver
        return (
            sender.region,
            sender.pages * sender.page_bytes,
            sender.page_bytes,
            receiver.remotes,
            receiver.memory.length,
            receiver.pages * receiver.page_bytes,
            receiver.page_bytes,
            list(extents) or [(0, 0, sender.page_bytes)],
        )

    def next_slot(self) -> int:
        self._slots += 1
        return self._slots

    def open(
        self,
        source_pages: list[int],
        destination_pages: list[int],
        *,
        streams: list[Any] | None = None,
        slot: int | None = None,
        generation: int = 0,
        expected: int | None = None,
    ) -> int:
        """Opens inbox (unless the slot is given) and transfer -> transfer."""
        streams = [self.stream()] if streams is None else streams
        layers = self.sender.layers
        if slot is None:
            slot = self.next_slot()
            if expected is None:
                expected = layers * len(source_pages) * sum(len(stream[-1]) for stream in streams)
            self.receiver.engine.open_inbox(self.endpoint, slot, generation, expected)
        self._transfers += 1
        self.sender.engine.open_transfer(
            self._transfers,
            self.peer,
            slot,
            generation,
            self.sender.counter,
            layers,
            streams,
            source_pages,
            destination_pages,
        )
        return self._transfers

    def run_step(self, step: int) -> None:
        """The model's side of a step: one layer after the other."""
        for layer in range(self.sender.layers):
            self.sender.layer_counter.advance(step * self.sender.layers + layer + 1)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@contextmanager
def pair(provider: str, *, remote: str | None = None, **arguments: Any) -> Iterator[Any]:
    both = Pair(provider, remote=remote, **arguments)
    try:
        yield both
    finally:
        both.close()


def main() -> None:
    provider = sys.argv[1]
    domains = sys.argv[2].split(",")
    memory_fd, cell_fd, doorbell_fd, socket_fd, layers, pages, page_bytes, post_timeout_ms, spin = map(
        int, sys.argv[3:]
    )
    memory = SharedMemory.open(memory_fd, layers * pages * page_bytes)
    counter = LayerCounter.open(cell_fd, doorbell_fd)
    side = Side(provider, memory, counter, (layers, pages, page_bytes), post_timeout_ms, bool(spin), domains)
    with socket.socket(fileno=socket_fd) as connection:
        _serve(side, connection.makefile("rw", encoding="utf-8"))
    side.close()


if __name__ == "__main__":
    main()
