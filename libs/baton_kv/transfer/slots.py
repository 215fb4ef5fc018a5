"""Inbox slots: given out by the receiving agent, used again only when no write of the former use can follow."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..errors import InvalidKvArgument, KvError
from ..immediate import SLOTS
from .outcome import Proof


class SlotKey(NamedTuple):
    """One use of a slot. `generation` counts the slot's uses from 1; an immediate carries its low 8 bits."""

    slot: int
    generation: int


class SlotsExhausted(KvError):
    """All slots are in use, quarantined ones included."""

    status = "RESOURCE_EXHAUSTED"
    reason = "KV_SLOTS_EXHAUSTED"

    def __init__(self, slots: int) -> None:
        super().__init__(
            f"all {slots} inbox slots are in use; one is free again when its transfer is over", slots=slots
        )
        self.slots = slots


class SlotNotInUse(KvError):
    """This use of the slot is over, or never was."""

    status = "NOT_FOUND"
    reason = "KV_SLOT_NOT_IN_USE"

    def __init__(self, slot: int, generation: int) -> None:
        super().__init__(f"slot {slot} is not in use under generation {generation}", slot=slot, generation=generation)
        self.slot = slot
        self.generation = generation


class SlotTable:
    """Slots `0 .. slots-1`. The one that has rested longest is given out next, so that generations wrap slowest.

    A slot is in use from `open` until `release`, which takes the proof that no write can follow; a slot whose proof is
    missing is simply never released.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        if not 1 <= slots <= SLOTS:
            raise InvalidKvArgument(f"slots is {slots}; an immediate can name 1 to {SLOTS}", slots=slots)
        self._slots = slots
        self._free = deque(range(slots))
        self._generations = [0] * slots
        # Proof of the latest use that is over; None while the slot is in use.
        self._proofs: list[Proof | None] = [Proof.QUIESCED] * slots

    @property
    def total(self) -> int:
        return self._slots

    @property
    def in_use(self) -> int:
        return self._slots - len(self._free)

    def open(self) -> SlotKey:
        """Gives out a slot under a new generation. Raises `SlotsExhausted`."""
        if not self._free:
            raise SlotsExhausted(self._slots)
        slot = self._free.popleft()
        self._generations[slot] += 1
        self._proofs[slot] = None
        return SlotKey(slot, self._generations[slot])

    def is_open(self, slot: int, generation: int) -> bool:
        """Whether this use of the slot is not over."""
        return 0 <= slot < self._slots and self._generations[slot] == generation and self._proofs[slot] is None

    def release(self, slot: int, generation: int, proof: Proof) -> None:
        """Ends a use. Raises `SlotNotInUse`."""
        if not self.is_open(slot, generation):
            raise SlotNotInUse(slot, generation)
        self._proofs[slot] = proof
        self._free.append(slot)

    def proof(self, slot: int, generation: int) -> Proof | None:
        """How a use ended; None while it lasts. Of a use before the latest only this is known: it is quiesced.

        Raises `SlotNotInUse` for a use that never was.
        """
        if not 0 <= slot < self._slots or not 1 <= generation <= self._generations[slot]:
            raise SlotNotInUse(slot, generation)
        return self._proofs[slot] if generation == self._generations[slot] else Proof.QUIESCED
