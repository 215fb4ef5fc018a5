"""Pages for requests: first come, first served, in a bounded queue with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from baton_kv.pool import PagePool
from baton_worker.errors import EngineUnavailable, ExceedsPagePool, QueueFull, ReservationTimeout


@dataclass(eq=False)
class _Waiter:
    owner: Hashable
    count: int
    pages: asyncio.Future[list[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def granted(self) -> bool:
        """The owner holds the pages, even if it has been cancelled since."""
        return self.pages.done() and not self.pages.cancelled() and self.pages.exception() is None


class PageReserver:
    """Owns a worker's page pool. Every release goes through here, so that a waiting request hears of it."""

    def __init__(self, pool: PagePool, max_waiting: int) -> None:
        self.pool = pool
        self._max_waiting = max_waiting
        self._waiters: deque[_Waiter] = deque()
        self._closed: str | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def reserve(self, owner: Hashable, count: int, timeout: float | None) -> list[int]:
        """Waits for `count` pages in the name of `owner`, at most `timeout` seconds.

        Raises ExceedsPagePool if the pool can never hold them, QueueFull if too many requests wait already,
        ReservationTimeout, and EngineUnavailable once closed. A cancelled wait holds nothing.
        """
        if self._closed is not None:
            raise EngineUnavailable(self._closed)
        if count > self.pool.total:
            raise ExceedsPagePool(count, self.pool.total)
        if not self._waiters and count <= self.pool.free:
            return self.pool.allocate(count, owner)
        if len(self._waiters) >= self._max_waiting:
            raise QueueFull(len(self._waiters))
        waiter = _Waiter(owner, count)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.pages
        except BaseException as error:
            if waiter.granted:
                self.release(owner)
            else:
                # _serve may have dropped the cancelled waiter already.
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                self._serve()
            if isinstance(error, TimeoutError):
                raise ReservationTimeout(count, timeout or 0.0) from None
            raise

    def hold(self, pages: list[int], owner: Hashable) -> None:
        """Adds an owner to pages that have one."""
        self.pool.hold(pages, owner)

    def release(self, owner: Hashable) -> None:
        """`owner` lets go; pages that nobody holds any more go to the first requests that wait."""
        self.pool.release(owner)
        self._serve()

    def quarantine(self, owner: Hashable, reason: str) -> None:
        """A write may still touch the owner's pages, and nobody can say for how long: shows them as kept back."""
        self.pool.quarantine(owner, reason, time.monotonic())

    def release_quarantine(self, owner: Hashable) -> None:
        """No write can touch the owner's pages any more: it lets go of them."""
        self.pool.release_quarantine(owner)
        self._serve()

    def close(self, why: str) -> None:
        """The cache is gone: nobody will let go of its pages, so whoever waits for some must not wait on.

        Owners may still let go. Idempotent.
        """
        self._closed = why
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.pages.done():
                waiter.pages.set_exception(EngineUnavailable(why))

    def _serve(self) -> None:
        while self._waiters and self._waiters[0].count <= self.pool.free:
            waiter = self._waiters.popleft()
            if waiter.pages.done():
                continue
            waiter.pages.set_result(self.pool.allocate(waiter.count, waiter.owner))
