"""Whether a peer is still there, from the answers to heartbeats. Pure: times are the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Answer(Enum):
    """How one heartbeat ended."""

    ALIVE = auto()
    # Nobody listens at the address, or the connection broke: known at once, so asked again soon.
    REFUSED = auto()
    # No answer in time: perhaps only slow.
    SILENT = auto()
    # Another incarnation answered.
    RESTARTED = auto()


class Verdict(Enum):
    PRESENT = auto()
    LOST = auto()
    RESTARTED = auto()


@dataclass(frozen=True)
class Beat:
    """What to do after a heartbeat: the verdict, and the seconds to wait before the next."""

    verdict: Verdict
    wait: float


class Liveness:
    """One peer. `limit` heartbeats in a row without an answer, and it is taken for lost.

    That is no fence: it only starts one, and lets the transfers to the peer fail.
    """

    def __init__(self, interval: float, limit: int, retry: float) -> None:
        """Seconds between heartbeats, misses allowed, and seconds before a refused one is repeated."""
        self._interval = interval
        self._limit = limit
        self._retry = min(retry, interval)
        self.misses = 0

    def judge(self, answer: Answer) -> Beat:
        if answer is Answer.RESTARTED:
            return Beat(Verdict.RESTARTED, 0.0)
        if answer is Answer.ALIVE:
            self.misses = 0
            return Beat(Verdict.PRESENT, self._interval)
        self.misses += 1
        if self.misses >= self._limit:
            return Beat(Verdict.LOST, 0.0)
        return Beat(Verdict.PRESENT, self._retry if answer is Answer.REFUSED else 0.0)
