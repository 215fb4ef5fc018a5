"""The 32 bits that accompany a write: `slot | generation | extents`, most significant first."""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidKvArgument

SLOT_BITS = 12
GENERATION_BITS = 8
EXTENT_BITS = 12

SLOTS = 1 << SLOT_BITS
GENERATIONS = 1 << GENERATION_BITS
MAX_EXTENTS = (1 << EXTENT_BITS) - 1


class Immediate(NamedTuple):
    """What one write says on arrival: which inbox, which use of it, and how many extents the write carried."""

    slot: int
    generation: int
    extents: int


def wire_generation(generation: int) -> int:
    """The part of a slot's generation that an immediate carries: its low 8 bits.

    A slot's generation counts its uses without wrapping; 8 bits suffice on the wire because a slot is used again only
    when no write of its former use can follow.
    """
    return generation & (GENERATIONS - 1)


def encode(slot: int, generation: int, extents: int) -> int:
    """Packs an immediate. `generation` may be the whole count or its low 8 bits. Raises `InvalidKvArgument`."""
    if not 0 <= slot < SLOTS:
        raise InvalidKvArgument(f"slot is {slot}; it must be in [0, {SLOTS})", slot=slot)
    if generation < 0:
        raise InvalidKvArgument(f"generation is {generation}; it must not be negative", generation=generation)
    if not 1 <= extents <= MAX_EXTENTS:
        raise InvalidKvArgument(f"extents is {extents}; one write carries 1 to {MAX_EXTENTS}", extents=extents)
    return (slot << (GENERATION_BITS + EXTENT_BITS)) | (wire_generation(generation) << EXTENT_BITS) | extents


def decode(immediate: int) -> Immediate:
    """Unpacks 32 bits; every value is legal here. Raises `InvalidKvArgument` for more than 32 bits."""
    if not 0 <= immediate < 1 << 32:
        raise InvalidKvArgument(f"immediate is {immediate}; it must fit in 32 bits", immediate=immediate)
    return Immediate(
        slot=immediate >> (GENERATION_BITS + EXTENT_BITS),
        generation=(immediate >> EXTENT_BITS) & (GENERATIONS - 1),
        extents=immediate & MAX_EXTENTS,
    )
