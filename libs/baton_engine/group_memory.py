"""What the ranks of one group share. Whoever starts them makes it, and hands each of them its descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from baton_engine._collectives import MAX_RANKS, memory_bytes
from baton_engine.errors import SpecInvalid
from baton_engine.messages import EngineSpec
from baton_memory import SharedMemory


def make_memory(ranks: int) -> SharedMemory:
    """Memory for one group of `ranks` ranks. Raises SpecInvalid, OSError."""
    if not 1 <= ranks <= MAX_RANKS:
        raise SpecInvalid(f"ranks is {ranks}; must be 1 to {MAX_RANKS}", ranks=ranks)
    return SharedMemory.create("baton-group", memory_bytes(ranks))


def make_rendezvous() -> int:
    """Descriptor of an empty file without a name, in which ranks on GPUs tell each other how to connect."""
    return os.memfd_create("baton-rendezvous", os.MFD_CLOEXEC)


@contextmanager
def open_group(spec: EngineSpec) -> Iterator[int | None]:
    """The descriptor for the ranks of the engine that `spec` describes; None for a single rank, which needs none.

    Raises SpecInvalid, OSError.
    """
    if spec.ranks == 1:
        yield None
    elif spec.device == "cuda":
        rendezvous = make_rendezvous()
        try:
            yield rendezvous
        finally:
            os.close(rendezvous)
    else:
        with make_memory(spec.ranks) as memory:
            yield memory.fd
