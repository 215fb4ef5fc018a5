"""Two native engines in two processes, as two agents have them: a transfer at a time, from its plan to the receiver."""

from __future__ import annotations

import os
import time
from typing import Any

from cores import place_pair
from line_processes import Pool, Run, cpu_seconds
from pages import LAYERS, Pages

from fabric_harness import Pair


class EnginePair:
    """The sender's engine is in this process, the receiver's in a child; pools of `pool_bytes` each, half of the cores
    each: this process, and what it starts, keeps the sender's."""

    def __init__(self, provider: str, pool_bytes: int, **options: Any) -> None:
        page = pool_bytes // LAYERS
        self._pair = Pair(provider, remote="receiver", layers=LAYERS, pages=1, page_bytes=page, **options)
        place_pair(os.getpid(), self._pair.receiver.process.pid)
        self.source = Pool(self._pair.sender.memory.fd, self._pair.sender.memory.length)
        self.destination = Pool(self._pair.receiver.memory.fd, self._pair.receiver.memory.length)
        self._step = 0
        capabilities = self._pair.sender.engine.capabilities()[0]
        self.provider = str(capabilities["provider"])
        self.window = int(capabilities["window"])

    def stream(self, pages: Pages) -> tuple[Any, ...]:
        sender, receiver = self._pair.sender, self._pair.receiver
        strides = (pages.layer_bytes, pages.page_bytes)
        remote = (receiver.remotes, receiver.memory.length)
        return (sender.region, *strides, *remote, *strides, [(0, 0, pages.page_bytes)])

    def run(self, pages: Pages) -> Run:
        """All layers are ready when the plan comes. From the call that submits it until the inbox is full."""
        transfer = self._pair.open(
            pages.source, pages.destination, streams=[self.stream(pages)], slot=0, expected=pages.extents
        )
        self._pair.receiver.engine.open_inbox(self._pair.endpoint, 0, 0, pages.extents)
        self._pair.run_step(self._step)
        before = self._cpu()
        begin = time.monotonic_ns()
        self._pair.sender.engine.submit_chunks([(transfer, self._step * LAYERS, 0, len(pages.source), True)])
        self._pair.sender.wait_named(["TransferDone"], 1, 120.0)
        (full,) = self._pair.receiver.wait_named(["InboxFull"], 1, 120.0)
        cpu = self._cpu() - before
        self._pair.receiver.engine.close_inbox(0, 0)
        self._step += 1
        return Run((full.full_ns - begin) / 1e9, cpu)

    def _cpu(self) -> float:
        return cpu_seconds(os.getpid()) + cpu_seconds(self._pair.receiver.process.pid)

    def close(self) -> None:
        self._pair.close()
