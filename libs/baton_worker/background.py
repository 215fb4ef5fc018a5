"""Work that outlives the request which began it: closing inboxes, cancelling transfers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

log = logging.getLogger(__name__)


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Returns when one of them is done, or after `timeout` seconds. None is cancelled."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


class BackgroundTasks:
    """Keeps tasks alive until they end; a failure is logged, never lost."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drain(self, timeout: float) -> None:
        """Waits for what runs, at most `timeout` seconds, then cancels the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
