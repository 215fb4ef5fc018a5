"""The sender's side: from the opening of a transfer until nothing reads the source's memory for it any more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .outcome import Ended, LifeError, Outcome


class Stage(Enum):
    """Each waits for something that is sure to come: see `TransferLife`."""

    # The peer is being connected and the engine told; nothing was posted.
    OPENING = "opening"
    # Chunks are planned and written.
    ACTIVE = "active"
    # No layer is begun any more; posted writes drain.
    CANCELLING = "cancelling"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """Cancel the transfer at the engine."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the sending endpoint of this peer: the engine then fails all that is left on it. Idempotent."""


@dataclass(frozen=True, slots=True)
class TellReceiver:
    """Call TransferAborted at the receiving agent, best effort: without it the receiver's own deadline helps."""

    reason: str
    quiesced: bool


Action = CancelWrites | Disconnect | TellReceiver | Ended


class TransferLife:
    """One transfer. Every method is an event and returns the actions to carry out, in their order.

    | stage      | waits for                                                                                    |
    |------------|----------------------------------------------------------------------------------------------|
    | OPENING    | `opened` or `open_failed`: connect and engine answer within their deadlines                  |
    | ACTIVE     | `done`, `failed`; the end of the session, the peer's loss or the owner's deadline otherwise  |
    | CANCELLING | the engine's terminal event; `drain_expired` by a timer forces it                            |

    The engine reports `done` on delivery completion only, never on local completions, which prove nothing about the
    destination. Calls of CancelTransfer and StopTransfer are answered after `Ended`, the latter with its `quiesced`. An
    event that comes too late changes nothing.
    """

    def __init__(self) -> None:
        self.stage = Stage.OPENING
        self.ended: Ended | None = None
        # Why the end that is under way was asked for, the first cause first.
        self._cause: tuple[Outcome, str] | None = None
        self._receiver_knows = False
        self._disconnect = False

    @property
    def accepts_chunks(self) -> bool:
        """Whether chunk plans go to the engine; for a transfer that is being cancelled, or over, they are dropped."""
        return self.stage is Stage.ACTIVE

    # --- the engine's answers and events -----------------------------------------------------------------------------

    def opened(self) -> list[Action]:
        """The engine knows the transfer."""
        if self.stage is Stage.ENDED:
            # Without a page to move the engine is done at once, perhaps before the caller is.
            return []
        if self.stage is not Stage.OPENING:
            raise LifeError("opened", self.stage.value)
        if self._cause is None:
            self.stage = Stage.ACTIVE
            return []
        self.stage = Stage.CANCELLING
        return [Disconnect() if self._disconnect else CancelWrites()]

    def open_failed(self, reason: str) -> list[Action]:
        """The engine does not know the transfer: nothing was posted."""
        if self.stage is not Stage.OPENING:
            raise LifeError("open_failed", self.stage.value)
        return self._end(*(self._cause or (Outcome.FAILED, reason)), quiesced=True)

    def done(self) -> list[Action]:
        """Every write is complete and delivered, even if it was to be cancelled meanwhile."""
        return self._end(Outcome.DONE, "", quiesced=True)

    def failed(self, reason: str, quiesced: bool) -> list[Action]:
        """Nothing reads the source's memory any more; `quiesced`: nothing touches the destination's either."""
        if self._cause is not None and self._cause[0] is Outcome.FAILED:
            reason = self._cause[1]
        return self._end(Outcome.FAILED, reason, quiesced)

    def cancelled(self, quiesced: bool) -> list[Action]:
        """Every posted write is complete."""
        return self._end(*(self._cause or (Outcome.CANCELLED, "CANCELLED")), quiesced)

    # --- who may end it early ----------------------------------------------------------------------------------------

    def cancel(self, reason: str = "CANCELLED_BY_SENDER") -> list[Action]:
        """The worker gives the transfer up, or its session ends: plans stop, writes drain."""
        return self._stop(Outcome.CANCELLED, reason)

    def stop(self) -> list[Action]:
        """The receiving agent asks for quiescence; it gets its answer from the call, so nothing else is told to it."""
        if self.stage is not Stage.ENDED:
            self._receiver_knows = True
        return self._stop(Outcome.CANCELLED, "STOPPED_BY_RECEIVER")

    def peer_lost(self, reason: str) -> list[Action]:
        """The receiving agent is taken for dead, or was restarted: what is in flight may never complete."""
        if self.stage is Stage.ENDED:
            return []
        self._decide(Outcome.FAILED, reason)
        return self._cut()

    def drain_expired(self) -> list[Action]:
        """Cancelling took too long."""
        return self._cut() if self.stage is Stage.CANCELLING else []

    # --- internals ---------------------------------------------------------------------------------------------------

    def _decide(self, outcome: Outcome, reason: str) -> None:
        if self._cause is None:
            self._cause = (outcome, reason)

    def _stop(self, outcome: Outcome, reason: str) -> list[Action]:
        if self.stage is Stage.ENDED:
            return []
        self._decide(outcome, reason)
        if self.stage is not Stage.ACTIVE:
            return []
        self.stage = Stage.CANCELLING
        return [CancelWrites()]

    def _cut(self) -> list[Action]:
        again, self._disconnect = self._disconnect, True
        if self.stage is Stage.OPENING or again:
            return []
        self.stage = Stage.CANCELLING
        return [Disconnect()]

    def _end(self, outcome: Outcome, reason: str, quiesced: bool) -> list[Action]:
        if self.stage is Stage.ENDED:
            return []
        self.stage = Stage.ENDED
        self.ended = Ended(outcome, reason, quiesced)
        if outcome is Outcome.DONE or self._receiver_knows:
            return [self.ended]
        return [self.ended, TellReceiver(reason, quiesced)]
