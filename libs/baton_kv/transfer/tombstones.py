"""Transfers that are over for good, remembered by the sender in bounded space."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from ..immediate import SLOTS

# More than agents of a cluster: who is forgotten while a worker still has a descriptor of a transfer that was stopped
# could be written to after all. 32 KiB each.
MAX_RECEIVERS = 4096


def _none_dead() -> array[int]:
    return array("q", [-1]) * SLOTS


@dataclass(slots=True)
class _Receiver:
    # By slot, the highest generation that is over; a slot's generations follow each other, so all before are over as
    # well.
    dead: array[int] = field(default_factory=_none_dead)
    # slot -> highest generation whose writes were not proven to have ended.
    unproven: dict[int, int] = field(default_factory=dict)


class Tombstones:
    """What the sending side keeps of ended and forbidden transfers, by the receiver's incarnation and slot.

    A receiver gives a slot out again only after the former transfer is quiesced or fenced, so one generation a slot is
    enough: `SLOTS` for each of at most `limit` incarnations, of which the longest unused goes first.
    """

    def __init__(self, limit: int = MAX_RECEIVERS) -> None:
        self._limit = limit
        self._receivers: OrderedDict[int, _Receiver] = OrderedDict()

    def bury(self, incarnation: int, slot: int, generation: int, *, quiesced: bool = True) -> None:
        """This transfer and all former ones of the slot are over: none may be opened any more."""
        receiver = self._receivers.get(incarnation)
        if receiver is None:
            receiver = self._receivers[incarnation] = _Receiver()
        self._receivers.move_to_end(incarnation)
        receiver.dead[slot] = max(generation, receiver.dead[slot])
        if not quiesced:
            receiver.unproven[slot] = max(generation, receiver.unproven.get(slot, -1))

    def is_dead(self, incarnation: int, slot: int, generation: int) -> bool:
        """Whether opening this transfer is forbidden: it was stopped, or has ended."""
        receiver = self._receivers.get(incarnation)
        return receiver is not None and generation <= receiver.dead[slot]

    def is_quiesced(self, incarnation: int, slot: int, generation: int) -> bool:
        """Whether a transfer that is not open can be said to have no writes in flight."""
        receiver = self._receivers.get(incarnation)
        return receiver is None or receiver.unproven.get(slot, -1) != generation

    def forget(self, keep: Collection[int]) -> None:
        """Drops the longest unused receivers beyond the limit, but none of `keep` (those with open transfers)."""
        surplus = len(self._receivers) - self._limit
        for incarnation in list(self._receivers):
            if surplus <= 0:
                return
            if incarnation not in keep:
                del self._receivers[incarnation]
                surplus -= 1

    def __len__(self) -> int:
        return len(self._receivers)
