"""Actors whose handlers never wait: what takes time runs beside them and comes back as a message."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from baton_actors import Actor, handles


@dataclass(frozen=True)
class WorkFailed:
    """Work that ran beside an actor raised what nobody expected."""

    error: BaseException


class WorkingActor(Actor):
    """Keeps the work that it started: none outlives it, and none fails unseen."""

    # A burst of events is as long as there are inboxes and transfers.
    mailbox_capacity = 1 << 18

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._work: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._finished)

    @handles
    async def work_failed(self, message: WorkFailed) -> None:
        """The actor no longer knows what it owns: it fails."""
        raise message.error

    async def on_stop(self, error: BaseException | None) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.running:
            self.tell(WorkFailed(error))
