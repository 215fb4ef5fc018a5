"""One side of another transfer engine, for peers.py: the commands of the bare loop (native/bare_loop.cpp), spoken for
NIXL or Mooncake. Runs in an environment of its own, without anything of Baton.

    python peer_side.py nixl|mooncake FD LENGTH
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from typing import Any

NODE = "127.0.0.1"
NOTE = b"done"


# Engines print to stdout as they please: answers have a descriptor of their own.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(*words: object) -> None:
    print(*words, file=ANSWERS, flush=True)


class Nixl:
    """UCX; the progress thread is off, so both sides poll. A job is one prepared transfer with a notification at its
    end, which is what the receiver sees."""

    def __init__(self, address: int, length: int) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        self._agent: Any = nixl_agent(f"side-{os.getpid()}", nixl_agent_config(enable_prog_thread=False))
        self._address = address
        self._agent.register_memory([(address, length, 0, "")], "DRAM")
        self._transfer: Any = None

    def identity(self) -> tuple[str, ...]:
        return self._agent.get_agent_metadata().hex(), str(self._address)

    def connect(self, metadata: str, address: str) -> None:
        self._peer = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._remote = int(address)

    def load(self, length: int, writes: list[tuple[int, int]]) -> None:
        if self._transfer is not None:
            self._agent.release_xfer_handle(self._transfer)
        ours = self._agent.get_xfer_descs([(self._address + source, length, 0) for source, _ in writes], "DRAM")
        theirs = self._agent.get_xfer_descs([(self._remote + to, length, 0) for _, to in writes], "DRAM")
        self._transfer = self._agent.initialize_xfer("WRITE", ours, theirs, self._peer, NOTE)

    def send(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            state = self._agent.check_xfer_state(self._transfer)

    def receive(self) -> int:
        while not self._agent.get_new_notifs():
            pass
        return time.monotonic_ns()


class Mooncake:
    """tcp. The sender's call returns when all is written; that is taken for what the receiver sees, in its favour."""

    def __init__(self, address: int, length: int) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self._engine: Any = TransferEngine()
        if self._engine.initialize(NODE, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake did not start")
        if self._engine.register_memory(address, length) != 0:
            raise RuntimeError("Mooncake did not take the memory")
        self._address = address

    def identity(self) -> tuple[str, ...]:
        return f"{NODE}:{self._engine.get_rpc_port()}", str(self._address)

    def connect(self, peer: str, address: str) -> None:
        self._peer, self._remote = peer, int(address)

    def load(self, length: int, writes: list[tuple[int, int]]) -> None:
        self._sources = [self._address + source for source, _ in writes]
        self._destinations = [self._remote + to for _, to in writes]
        self._lengths = [length] * len(writes)

    def send(self) -> None:
        if self._engine.batch_transfer_sync_write(self._peer, self._sources, self._destinations, self._lengths) != 0:
            raise RuntimeError("the transfer failed")

    def receive(self) -> int:
        return 0


def main() -> None:
    name, fd, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    side = {"nixl": Nixl, "mooncake": Mooncake}[name](address, length)
    say("ready", *side.identity())
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "load":
            writes = [tuple(map(int, sys.stdin.readline().split())) for _ in range(int(arguments[1]))]
            side.load(int(arguments[0]), writes)  # type: ignore[arg-type]
            say("loaded")
        elif command == "connect":
            side.connect(*arguments)
            say("connected")
        elif command == "receive":
            say("armed")
            say(0, side.receive())
        else:
            begin = time.monotonic_ns()
            side.send()
            say(begin, time.monotonic_ns())
    # Their threads do not always end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
