"""What the ranks of one group share. Whoever starts them makes it, and hands each of them its descriptor."""

from __future__ import annotations

from baton_engine._collectives import MAX_RANKS, memory_bytes
from baton_engine.errors import SpecInvalid
from baton_memory import SharedMemory


def make_memory(ranks: int) -> SharedMemory:
    """Memory for one group of `ranks` ranks. Raises SpecInvalid, OSError."""
    if not 1 <= ranks <= MAX_RANKS:
        raise SpecInvalid(f"ranks is {ranks}; must be 1 to {MAX_RANKS}", ranks=ranks)
    return SharedMemory.create("baton-group", memory_bytes(ranks))
