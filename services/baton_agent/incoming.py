"""An inbox at its receiver: what the agent knows of it, and what its worker is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from baton.v1 import agent_pb2

from baton_kv.transfer.inbox import InboxLife
from baton_kv.transfer.outcome import Ended, Outcome, Proof
from baton_kv.transfer.slots import SlotKey

from .checksums import Part
from .endpoints import Endpoint
from .errors import FenceFailed
from .session import SessionView


@dataclass
class Incoming:
    """One inbox. `full`: the engine's event, once every extent is there."""

    key: SlotKey
    session: SessionView
    endpoint: Endpoint
    life: InboxLife = field(default_factory=InboxLife)
    waiting: list[asyncio.Future[Proof]] = field(default_factory=list)
    full: Any = None
    # What the checksum covers, and the sender's once it has told.
    checked: list[Part] | None = None
    checksum: int | None = None
    violated: bool = False
    # When its quarantine began, 0 before.
    since: float = 0.0

    @property
    def fill_ns(self) -> int:
        """From the first immediate to the last, once it is full."""
        return max(0, int(self.full.full_ns) - int(self.full.first_ns))

    def tell(self, ended: Ended) -> None:
        """The worker hears of the end unless it has asked for it."""
        slot, generation = self.key
        if ended.outcome is Outcome.DONE:
            self.session.events.emit(
                inbox_full=agent_pb2.InboxFull(
                    slot=slot,
                    generation=generation,
                    extents=self.full.extents,
                    duration_us=self.fill_ns // 1000,
                    first_ns=self.full.first_ns,
                    full_ns=self.full.full_ns,
                )
            )
        elif ended.outcome is Outcome.FAILED:
            self.session.events.emit(
                inbox_failed=agent_pb2.InboxFailed(
                    slot=slot, generation=generation, reason=ended.reason, quiesced=ended.quiesced
                )
            )

    def answer(self, proof: Proof) -> None:
        """Those who wait for the proof that it can be used again."""
        for answer in self.waiting:
            if not answer.done():
                answer.set_result(proof)

    def answer_unproven(self) -> None:
        """Those who wait get FenceFailed, and may ask again."""
        slot, generation = self.key
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(
                    FenceFailed(
                        f"the endpoint of slot {slot}, generation {generation} could not be closed: try again",
                        slot=slot,
                        generation=generation,
                    )
                )
        self.waiting.clear()
