"""Ties a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class Orphaned(Exception):
    """The parent died before the child could ask to be told."""


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` (a pid) that started it ends. Raises Orphaned."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    # A parent that died before the call above sent no signal.
    if os.getppid() != parent:
        raise Orphaned(f"started by process {parent}, now a child of {os.getppid()}")
