"""Each side of a measurement has half of the cores to itself, as if it were a host of its own.

Left to the scheduler, the threads that write and that read over loopback share a core now and then, for the life of a
process or for some milliseconds, and what is measured is that: on two cores a bare loop with 384 KiB a write moves
3.1 GB/s where they share one, 6.6 where they don't, and 4.4 to 6.8 (a median of some rounds in a fresh pair) unpinned.
"""

from __future__ import annotations

import os
from pathlib import Path


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """(the sender's, the receiver's) of those that this process started with; both the same where there is one."""
    half = max(len(_ALL) // 2, 1)
    return frozenset(_ALL[:half]), frozenset(_ALL[-half:])


def place(pid: int, cores: frozenset[int]) -> None:
    """All threads that the process has; those that it starts later inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def place_pair(sender: int, receiver: int) -> None:
    """Two processes, on a half each."""
    for pid, cores in zip((sender, receiver), halves(), strict=True):
        place(pid, cores)


_ALL = sorted(os.sched_getaffinity(0))
