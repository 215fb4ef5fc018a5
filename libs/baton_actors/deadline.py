"""A point in time after which nobody waits any more."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """Work was not done in time."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "the deadline has passed") -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {}


@dataclass(frozen=True)
class Deadline:
    """``at`` is in seconds of ``clock`` (time.monotonic by default); None never passes."""

    at: float | None
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> "Deadline":
        return cls(None if seconds is None else clock() + seconds, clock)

    @classmethod
    def never(cls) -> "Deadline":
        return cls(None)

    def remaining(self) -> float | None:
        """Seconds left, never negative; None if the deadline never passes."""
        return None if self.at is None else max(0.0, self.at - self.clock())

    @property
    def passed(self) -> bool:
        return self.at is not None and self.clock() >= self.at

    def limited(self, seconds: float | None) -> "Deadline":
        """The earlier of this deadline and ``seconds`` from now."""
        if seconds is None:
            return self
        other = self.clock() + seconds
        return self if self.at is not None and self.at <= other else Deadline(other, self.clock)

    def check(self, what: str = "") -> None:
        """Raises DeadlineExceeded if the deadline has passed."""
        if self.passed:
            raise DeadlineExceeded(f"{what}: the deadline has passed" if what else "the deadline has passed")

    async def wait(self, awaitable: Awaitable[T], what: str = "") -> T:
        """Awaits until the deadline, then cancels and raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.remaining()) as scope:
                return await awaitable
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"{what}: not done in time" if what else "not done in time") from error
