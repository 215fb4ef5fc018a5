"""Keeps children running: one for one, with back-off and a limit."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)


class Child(Protocol):
    """An Actor, or anything with its life cycle."""

    async def start(self) -> None: ...
    async def join(self) -> None: ...
    async def stop(self) -> None: ...


class RestartLimitExceeded(Exception):
    """A child failed too often; its supervisor gives up."""

    status = "INTERNAL"
    reason = "RESTART_LIMIT"

    def __init__(self, child: str, restarts: int, period: float, last: BaseException) -> None:
        super().__init__(f"{child} failed again after {restarts} restarts within {period:g} s: {last}")
        self.fields = {"child": child, "restarts": str(restarts), "period_s": f"{period:g}"}


@dataclass
class RestartPolicy:
    """At most ``limit`` restarts within ``period`` seconds; the n-th waits first * 2**(n-1), at most longest.

    Pure: the caller gives the time.
    """

    limit: int = 5
    period: float = 60.0
    first: float = 0.1
    longest: float = 10.0
    _restarts: "deque[float]" = field(default_factory=deque, repr=False)

    def delay(self, now: float) -> float | None:
        """Seconds to wait before the restart that this call grants, or None: the limit is reached."""
        while self._restarts and now - self._restarts[0] > self.period:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return None
        self._restarts.append(now)
        return float(min(self.longest, self.first * 2.0 ** (len(self._restarts) - 1)))


class Supervisor:
    """Starts children by factory and restarts those that fail; a child that simply ends is not restarted.

    ``join`` raises RestartLimitExceeded when a child has used up its restarts, after the others have been stopped.
    """

    def __init__(self, name: str = "supervisor") -> None:
        self.name = name
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None

    async def start(
        self,
        name: str,
        factory: Callable[[], Child],
        policy: RestartPolicy | None = None,
    ) -> Child:
        """Raises what the first start raises."""
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        if name in self._watchers:
            raise ValueError(f"{self.name} already has a child {name!r}")
        child = factory()
        await child.start()
        self._children[name] = child
        watch = self._watch(name, factory, policy or RestartPolicy())
        self._watchers[name] = asyncio.create_task(watch, name=f"{self.name} watches {name}")
        return child

    def child(self, name: str) -> Child:
        """The present incarnation. Raises KeyError."""
        return self._children[name]

    async def join(self) -> None:
        """Until a child fails for good (raises), or ``stop``."""
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Stops the children, last started first. Idempotent."""
        await self._stop_children()
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    async def _stop_children(self) -> None:
        for name in reversed(list(self._watchers)):
            watcher = self._watchers.pop(name)
            if watcher is not asyncio.current_task():
                watcher.cancel()
                await asyncio.wait([watcher])
            await self._children.pop(name).stop()

    async def _watch(
        self,
        name: str,
        factory: Callable[[], Child],
        policy: RestartPolicy,
    ) -> None:
        while True:
            try:
                await self._children[name].join()
                logger.info("%s: %s ended", self.name, name)
                return
            except Exception as error:
                last = error
                self._log(name, "failed", error)
            while True:
                delay = policy.delay(time.monotonic())
                if delay is None:
                    await self._escalate(RestartLimitExceeded(name, policy.limit, policy.period, last))
                    return
                await asyncio.sleep(delay * random.uniform(0.8, 1.2))
                try:
                    successor = factory()
                    await successor.start()
                except Exception as error:
                    last = error
                    self._log(name, "failed to start again", error)
                    continue
                self._children[name] = successor
                logger.warning("%s: %s runs again", self.name, name)
                break

    def _log(self, child: str, what: str, error: Exception) -> None:
        # A typed error says all there is to say; only the unexpected needs its traceback.
        unexpected = None if hasattr(error, "reason") else error
        logger.error("%s: %s %s: %s", self.name, child, what, error, exc_info=unexpected)

    async def _escalate(self, error: RestartLimitExceeded) -> None:
        await self._stop_children()
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
