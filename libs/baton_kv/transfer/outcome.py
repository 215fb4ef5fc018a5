"""How a transfer ends, and how it is known that no write of it can follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """The one terminal event of a transfer, on either side."""

    # Receiver: every extent has arrived. Sender: every write is delivered.
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Proof(Enum):
    """Why the pages, tail buffers and the slot of an inbox may be used again."""

    # Every extent has arrived, and each is written once.
    FULL = "full"
    # The sending agent confirmed: no further post, every posted write completed or flushed. Or it never heard of it.
    QUIESCED = "quiesced"
    # The endpoint over which the sender wrote is closed and drained.
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Ended:
    """Terminal, exactly once a life. `reason` is UPPER_SNAKE, empty for DONE.

    `quiesced`: no write of the transfer can touch the destination's memory any more. At the sender nothing reads the
    source's memory any more, whatever `quiesced` says.
    """

    outcome: Outcome
    reason: str
    quiesced: bool


class LifeError(Exception):
    """A caller's own mistake: an event that its state excludes. What comes from outside is never an error here."""

    status = "INTERNAL"
    reason = "KV_LIFE_ERROR"

    def __init__(self, event: str, stage: str) -> None:
        super().__init__(f"event {event} can't happen in stage {stage}")
        self.fields = {"event": event, "stage": stage}
