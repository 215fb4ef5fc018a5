"""Which of a worker's data-parallel engines gets a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine as a request finds it. `free`: pages that nobody holds; `waiting`: requests that wait for pages;
    `requests`: all that are being served; `cached`: pages of the request's own prefix that are there already; `idle`:
    how many of these are among the free ones; `max_batch`: requests that it decodes at a time."""

    free: int
    waiting: int
    requests: int
    cached: int = 0
    idle: int = 0
    max_batch: int = 1 << 32

    def has_room(self, pages: int) -> bool:
        """Whether a request of so many pages gets them at once."""
        return self.waiting == 0 and pages - self.cached <= self.free - self.idle


def place(loads: Sequence[EngineLoad], pages: int) -> int:
    """The index of the engine for a request of so many pages.

    Of the engines that can give them at once, the one with the most pages free, where a page that need not be computed
    or fetched again counts as a free one: a prefix draws requests to where it is until that engine is fuller by as much
    as the prefix saves; but first those in whose batch it has a place, or fewer are before it: pages alone would send
    any number of small requests past an engine that holds one large one. If none can, the one with the shortest queue.
    Ties go to fewer requests, then to the first.
    """

    def merit(index: int) -> tuple[bool, int, int, int, int]:
        load = loads[index]
        at_once = load.has_room(pages)
        before = max(0, load.requests + 1 - load.max_batch)
        return not at_once, 0 if at_once else load.waiting, before, -(load.free + load.cached), load.requests

    return min(range(len(loads)), key=merit)
