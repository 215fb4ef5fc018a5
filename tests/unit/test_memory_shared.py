"""Shared memory and the layer counter."""

import fcntl
import os
import select
from pathlib import Path

import pytest

from baton_memory import CounterMovedBack, LayerCounter, MemoryInUse, MemoryInvalid, SharedMemory
from descriptors import open_descriptors


def test_two_mappings_of_one_memory_see_each_other():
    with SharedMemory.create("pages", 10_000) as mine, SharedMemory.open(os.dup(mine.fd), 10_000) as theirs:
        assert mine.address != theirs.address
        mine.buffer[9_999] = 7
        assert theirs.buffer[9_999] == 7
        assert len(theirs.buffer) == theirs.length == 10_000


def test_memory_is_present_when_created():
    with SharedMemory.create("prefaulted-pages", 1 << 20):
        maps = Path("/proc/self/smaps").read_text().split("memfd:prefaulted-pages")[1]
    resident = next(line for line in maps.splitlines() if line.startswith("Rss"))
    assert resident.split() == ["Rss:", "1024", "kB"]


def test_size_is_sealed():
    with SharedMemory.create("pages", 4096) as memory:
        for size in (0, 1 << 20):
            with pytest.raises(OSError):
                os.ftruncate(memory.fd, size)


def test_closing_while_viewed_is_refused_and_changes_nothing():
    memory = SharedMemory.create("pages", 4096)
    view = memory.buffer[1:2]
    with pytest.raises(MemoryInUse):
        memory.close()
    memory.buffer[1] = 3
    assert view[0] == 3
    view.release()
    memory.close()
    memory.close()
    with pytest.raises(ValueError):
        _ = memory.buffer


def test_nothing_leaks():
    before = open_descriptors()
    for _ in range(20):
        memory, counter = SharedMemory.create("pages", 4096), LayerCounter.create()
        memory.close()
        counter.close()
        with pytest.raises(MemoryInvalid):
            SharedMemory.create("pages", 0)
    assert open_descriptors() == before


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    return fd


def write_sealed() -> int:
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return fd


def read_only() -> int:
    with SharedMemory.create("read only", 8192) as memory:
        return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)


def too_short() -> int:
    with SharedMemory.create("short", 4095) as memory:
        return os.dup(memory.fd)


@pytest.mark.parametrize(
    "make", [unsealed, write_sealed, read_only, too_short, lambda: os.open("/dev/null", os.O_RDWR)]
)
def test_only_sealed_writable_memory_is_opened(make):
    fd = make()
    with pytest.raises(MemoryInvalid) as error:
        SharedMemory.open(fd, 4096)
    assert error.value.status == "INVALID_ARGUMENT"
    os.close(fd)


def test_counter_shows_and_rings_at_the_other_side():
    mine = LayerCounter.create()
    theirs = LayerCounter.open(os.dup(mine.memory_fd), os.dup(mine.doorbell_fd))
    assert theirs.value() == 0
    assert not select.select([theirs.doorbell_fd], [], [], 0)[0]
    mine.advance(2**40 + 1)
    assert select.select([theirs.doorbell_fd], [], [], 0)[0]
    assert theirs.value() == 2**40 + 1
    mine.close()
    theirs.close()
    theirs.close()


def test_counter_never_goes_back():
    counter = LayerCounter.create()
    counter.advance(5)
    counter.advance(5)
    with pytest.raises(CounterMovedBack):
        counter.advance(4)
    assert counter.value() == 5
    counter.close()


def test_counter_wants_an_eventfd():
    counter = LayerCounter.create()
    read, write = os.pipe()
    with pytest.raises(MemoryInvalid):
        LayerCounter.open(counter.memory_fd, read)
    os.close(read)
    os.close(write)
    counter.close()
