"""Work that outlives the request which began it: closing inboxes, cancelling transfers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
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
        self._attended: set[asyncio.Future[None]] = set()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Work of which others have the task: `drain` waits for its end, and so for what it spawns last.

        A stopped gRPC server has cancelled its handlers, but not waited for them.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attended.add(ended)
        try:
            yield
        finally:
            self._attended.discard(ended)
            ended.set_result(None)

    def spawn(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drain(self, timeout: float) -> None:
        """Waits for what runs and what that spawns, at most `timeout` seconds, then cancels the rest."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (work := {*self._tasks, *self._attended}) and (left := deadline - loop.time()) > 0:
            await first_of(*work, timeout=left)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
