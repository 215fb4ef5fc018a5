"""The ranks' collectives over shared memory; see native/."""

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

MAX_RANKS: int
PIECE_BYTES: int

class Element(Enum):
    FLOAT32 = 0
    BFLOAT16 = 1

def memory_bytes(ranks: int) -> int: ...

# What went wrong ("" for nothing, "aborted", "dead", "late", "differs"), and with which rank.
Answer: TypeAlias = tuple[str, int]

class Group:
    def __init__(self, memory: int, ranks: int, rank: int, patience_us: int, spin_us: int) -> None: ...
    def begin(self, epoch: int) -> None: ...
    def abort(self) -> None: ...
    def meet(self) -> Answer: ...
    def all_reduce(self, address: int, count: int, element: Element) -> Answer: ...
    def all_gather(self, address: int, rows: int, row_bytes: int, allocate: Callable[[int], int]) -> Answer: ...
