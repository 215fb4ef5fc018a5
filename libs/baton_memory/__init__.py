"""Shareable memory, hand-off of descriptors between processes, and the layer counter."""

from .counter import LayerCounter
from .errors import (
    CounterMovedBack,
    FrameInvalid,
    HandoffError,
    MemoryInUse,
    MemoryInvalid,
    OfferInvalid,
    SharedMemoryError,
    SocketInUse,
    SocketPathInvalid,
)
from .handoff import HandoffConnection, hand_over, mapping_seconds
from .offer import Handoff, region_bytes
from .shared import SharedMemory

__all__ = [
    "CounterMovedBack",
    "FrameInvalid",
    "Handoff",
    "HandoffConnection",
    "HandoffError",
    "LayerCounter",
    "MemoryInUse",
    "MemoryInvalid",
    "OfferInvalid",
    "SharedMemory",
    "SharedMemoryError",
    "SocketInUse",
    "SocketPathInvalid",
    "hand_over",
    "mapping_seconds",
    "region_bytes",
]
