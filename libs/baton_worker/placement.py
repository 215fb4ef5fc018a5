"""Which of a worker's data-parallel engines gets a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine as a request finds it. `free`: pages that nobody holds; `waiting`: requests that wait for pages;
    `requests`: all that are being served; `cached`: pages of the request's own prefix that are there already; `idle`:
    how many of these are among the free ones."""

    free: int
    waiting: int
    requests: int
    cached: int = 0
    idle: int = 0


def place(loads: Sequence[EngineLoad], pages: int) -> int:
    """The index of the engine for a request of so many pages.

    Of the engines that can give them at once, the one with the most pages free, where a page that need not be computed
    or fetched again counts as a free one: a prefix draws requests to where it is until that engine is fuller by as much
    as the prefix saves. If none can, the one with the shortest queue. Ties go to fewer requests, then to the first.
    """

    def merit(index: int) -> tuple[bool, int, int, int]:
        load = loads[index]
        at_once = load.waiting == 0 and pages - load.cached <= load.free - load.idle
        return not at_once, 0 if at_once else load.waiting, -(load.free + load.cached), load.requests

    return min(range(len(loads)), key=merit)
