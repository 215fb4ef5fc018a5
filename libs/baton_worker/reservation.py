"""Pages for requests: first come, first served, in a bounded queue with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from baton_kv.pool import PagePool
from baton_kv.prefix import PageChain
from baton_worker.errors import EngineUnavailable, ExceedsPagePool, QueueFull, ReservationTimeout


@dataclass(frozen=True, slots=True)
class Reservation:
    """A sequence's pages in its order. The first `cached` hold the prefix that another one has written already: they
    are shared, and only the others may be written."""

    pages: tuple[int, ...]
    cached: int = 0


@dataclass
class PrefixStatistics:
    """Of the sequences that were given pages: tokens looked up in the prefix cache, and found."""

    queried_tokens: int = 0
    found_tokens: int = 0


@dataclass(eq=False)
class _Waiter:
    owner: Hashable
    count: int
    chain: PageChain | None
    reservation: asyncio.Future[Reservation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def granted(self) -> bool:
        """The owner holds the pages, even if it has been cancelled since."""
        answer = self.reservation
        return answer.done() and not answer.cancelled() and answer.exception() is None


class PageReserver:
    """Owns a worker's page pool. Every release goes through here, so that a waiting request hears of it."""

    def __init__(self, pool: PagePool, max_waiting: int) -> None:
        self.pool = pool
        self.prefixes = PrefixStatistics()
        # Called when an owner has let go and nobody waits here.
        self.on_spare: Callable[[], None] | None = None
        self._max_waiting = max_waiting
        self._waiters: deque[_Waiter] = deque()
        self._closed: str | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def reserve(
        self, owner: Hashable, count: int, timeout: float | None, chain: PageChain | None = None
    ) -> Reservation:
        """Waits for `count` pages in the name of `owner`, at most `timeout` seconds.

        With `chain`, those of its pages that are in the prefix cache are the first of them; what is there counts when
        the pages are given, not when they are asked for. Raises ExceedsPagePool if the pool can never hold them,
        QueueFull if too many requests wait already, ReservationTimeout, and EngineUnavailable once closed. A cancelled
        wait holds nothing.
        """
        if self._closed is not None:
            raise EngineUnavailable(self._closed)
        if count > self.pool.total:
            raise ExceedsPagePool(count, self.pool.total)
        waiter = _Waiter(owner, count, chain)
        if not self._waiters and (granted := self._grant(waiter)) is not None:
            return granted
        if len(self._waiters) >= self._max_waiting:
            raise QueueFull(len(self._waiters))
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.reservation
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

    def reserve_now(self, owner: Hashable, count: int, chain: PageChain | None = None) -> Reservation | None:
        """What `reserve` gives, if it gives it at once."""
        if self._closed is not None or self._waiters or count > self.pool.total:
            return None
        return self._grant(_Waiter(owner, count, chain))

    def keep(self, chain: PageChain, pages: Sequence[int], tokens: int) -> int:
        """The first `tokens` tokens of a sequence are in its pages: the full ones may be found by others from now on.

        How many of them that are: somebody holds them, and nobody writes into them any more.
        """
        full = min(tokens // chain.page_size, len(chain.keys))
        self.pool.keep(chain.keys[:full], pages[:full])
        return full

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody finds these pages any more, nor what follows them; whoever holds them goes on doing so."""
        self.pool.forget(pages)

    def hold(self, pages: Sequence[int], owner: Hashable) -> None:
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
            if not waiter.reservation.done():
                waiter.reservation.set_exception(EngineUnavailable(why))

    def _grant(self, waiter: _Waiter) -> Reservation | None:
        """The waiter's pages, or None if there are too few now."""
        chain = waiter.chain
        prefix = self.pool.match(chain.keys)[: waiter.count] if chain is not None else []
        more = waiter.count - len(prefix)
        if more > self.pool.available(prefix):
            return None
        pages = self.pool.allocate(more, waiter.owner, prefix)
        if chain is not None:
            self.prefixes.queried_tokens += chain.tokens
            self.prefixes.found_tokens += len(prefix) * chain.page_size
        return Reservation((*prefix, *pages), len(prefix))

    def _serve(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.reservation.done():
                granted = self._grant(waiter)
                if granted is None:
                    return
                waiter.reservation.set_result(granted)
            self._waiters.popleft()
        if self.on_spare is not None:
            self.on_spare()
