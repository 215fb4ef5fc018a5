"""The layer counter: one cumulative 64-bit number in shared memory, and an eventfd that is rung when it moves.

After layer l of forward step s has its KV entries written, the model process stores s * layers + l + 1.
"""

from __future__ import annotations

import mmap
import os
import threading

from .errors import CounterMovedBack, MemoryInvalid
from .shared import SharedMemory, check_memory

COUNTER_BYTES = 8


def check_doorbell(fd: int) -> None:
    """Checks that `fd` is an eventfd. Raises MemoryInvalid."""
    try:
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        raise MemoryInvalid(f"descriptor {fd} cannot be read: {error}", fd=fd) from error
    if kind != "anon_inode:[eventfd]":
        raise MemoryInvalid(f"descriptor {fd} is no eventfd but {kind}", fd=fd, kind=kind)


class LayerCounter:
    """One process stores, any number read. Starts at 0."""

    def __init__(self, memory: SharedMemory, doorbell_fd: int) -> None:
        """Takes ownership of both; use `create` or `open`."""
        self._memory = memory
        self._cell = memory.buffer.cast("Q")
        self.doorbell_fd = doorbell_fd
        # Held all the time: see `advance`.
        self._order = threading.Lock()
        self._order.acquire()

    @classmethod
    def create(cls) -> LayerCounter:
        """A counter of its own page, and its doorbell."""
        memory = SharedMemory.create("baton-layer-counter", mmap.PAGESIZE)
        try:
            return cls(memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except BaseException:
            memory.close()
            raise

    @classmethod
    def open(cls, memory_fd: int, doorbell_fd: int) -> LayerCounter:
        """Maps a counter that another process handed over, and owns both descriptors from then on.

        Raises MemoryInvalid (then the caller keeps them).
        """
        check_memory(memory_fd, COUNTER_BYTES)
        check_doorbell(doorbell_fd)
        return cls(SharedMemory.open(memory_fd, os.fstat(memory_fd).st_size), doorbell_fd)

    @property
    def memory_fd(self) -> int:
        return self._memory.fd

    @property
    def address(self) -> int:
        """Where this process has the cell mapped: the first of `memory_length` bytes, at the beginning of a page."""
        return self._memory.address

    @property
    def memory_length(self) -> int:
        return self._memory.length

    def value(self) -> int:
        return self._cell[0]

    def advance(self, value: int) -> None:
        """Stores `value` and rings. Whoever sees the value sees every KV entry written before this call.

        Raises CounterMovedBack if the counter already stands higher.
        """
        if value < self._cell[0]:
            raise CounterMovedBack(f"the counter stands at {self._cell[0]} and can't go back to {value}", value=value)
        # Release and acquire are a full barrier on weakly ordered machines (arm64), where the plain store below could
        # otherwise be seen before the KV entries; x86-64 needs none. An aligned 8-byte memoryview store is one store.
        self._order.release()
        self._order.acquire()
        self._cell[0] = value
        os.eventfd_write(self.doorbell_fd, 1)

    def close(self) -> None:
        if self._memory.fd < 0:
            return
        self._cell.release()
        self._memory.close()
        os.close(self.doorbell_fd)
        self.doorbell_fd = -1
