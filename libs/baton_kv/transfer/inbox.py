"""The receiver's side: from the opening of an inbox until its memory may be used again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .outcome import Ended, LifeError, Outcome, Proof


class Stage(Enum):
    """Each waits for something that is sure to come: see `InboxLife`."""

    # Slot, endpoint and counter are being set up; nobody has heard of the slot.
    OPENING = "opening"
    RECEIVING = "receiving"
    # The sending agent was asked to stop.
    STOP_REQUESTED = "stop_requested"
    # The endpoint is being closed.
    FENCING = "fencing"
    # The fence failed: quarantine, until another attempt succeeds.
    UNPROVEN = "unproven"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class AskStop:
    """Call StopTransfer at the sending agent, with a deadline; report `stop_answered` or `stop_failed`."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Close the endpoint over which this transfer's sender writes; report `fenced` or `fence_failed`.

    `fenced` goes to every inbox of that endpoint.
    """


@dataclass(frozen=True, slots=True)
class Reusable:
    """Last action, exactly once: counter, slot, pages and tail buffers may be used again. Calls of CloseInbox end."""

    proof: Proof


Action = AskStop | Fence | Ended | Reusable


class InboxLife:
    """One inbox. Every method is an event and returns the actions to carry out, in their order.

    | stage          | waits for                                                         |
    |----------------|-------------------------------------------------------------------|
    | OPENING        | `opened` or `open_failed`: the engine's own answer                |
    | RECEIVING      | `full`, `aborted`, `peer_lost`, or `close` at the owner's deadline |
    | STOP_REQUESTED | `stop_answered` or `stop_failed` (a deadline at the latest)       |
    | FENCING        | `fenced` or `fence_failed`: the engine's own answer               |
    | UNPROVEN       | `retry_fence` by a timer, or `close`                              |

    `Ended` comes once it is known that the memory is quiesced, or that this can't be shown now (the fence failed);
    then the owner's pages belong in quarantine until `Reusable`. An event that comes too late changes nothing.
    """

    def __init__(self) -> None:
        self.stage = Stage.OPENING
        self.ended: Ended | None = None
        self.proof: Proof | None = None
        # What the end will be, once decided.
        self._cause: tuple[Outcome, str] | None = None
        self._full = False
        # A sender that wrote more than it should is not believed when it says that it has stopped.
        self._trusted = True

    # --- the engine's answers and events -----------------------------------------------------------------------------

    def opened(self) -> list[Action]:
        """The counter exists; the descriptor may go to the sender unless `stage` is CLOSED now."""
        if self.stage is not Stage.OPENING:
            raise LifeError("opened", self.stage.value)
        if not self._trusted:
            return self._fence()
        if self._full:
            return self._finish(Proof.FULL)
        if self._cause is not None:
            return self._finish(Proof.QUIESCED)
        self.stage = Stage.RECEIVING
        return []

    def open_failed(self, reason: str) -> list[Action]:
        """There is no counter, and nobody heard of the slot."""
        if self.stage is not Stage.OPENING:
            raise LifeError("open_failed", self.stage.value)
        self._decide(Outcome.FAILED, reason)
        return self._finish(Proof.QUIESCED)

    def full(self) -> list[Action]:
        """Every expected extent has arrived, and is right if that is checked.

        One that is full while it is being fenced for a failure is done."""
        if self.stage is Stage.CLOSED or not self._trusted:
            return []
        self._full = True
        if self.stage is Stage.OPENING:
            return []
        return self._finish(Proof.FULL)

    def mismatched(self, reason: str = "CHECKSUM_MISMATCH") -> list[Action]:
        """Every expected extent has arrived, and the bytes are not those that were sent, or nobody can say whether they
        are. Instead of `full`."""
        if self.stage in (Stage.OPENING, Stage.CLOSED) or not self._trusted:
            return []
        self._decide(Outcome.FAILED, reason)
        return self._finish(Proof.FULL, whole=False)

    def violated(self) -> list[Action]:
        """More extents came than were expected."""
        if self.stage is Stage.CLOSED:
            return []
        self._trusted = False
        return self._fail("TOO_MANY_EXTENTS")

    def fenced(self) -> list[Action]:
        """The endpoint is closed and drained, for this inbox or for another one on it."""
        match self.stage:
            case Stage.CLOSED:
                return []
            case Stage.OPENING:
                self._decide(Outcome.FAILED, "ENDPOINT_FENCED")
                return []
            case _:
                self._decide(Outcome.FAILED, "ENDPOINT_FENCED")
                return self._finish(Proof.FENCED)

    def fence_failed(self) -> list[Action]:
        """The endpoint could not be closed; whether writes can land is not known."""
        if self.stage is not Stage.FENCING:
            return []
        self.stage = Stage.UNPROVEN
        return self._end(quiesced=False)

    # --- the other agent ---------------------------------------------------------------------------------------------

    def aborted(self, reason: str, quiesced: bool) -> list[Action]:
        """The sender says that it won't complete the transfer."""
        if self.stage in (Stage.OPENING, Stage.CLOSED):
            return []
        if quiesced and self._trusted:
            self._decide(Outcome.FAILED, reason)
            return self._finish(Proof.QUIESCED)
        return self._fail(reason)

    def stop_answered(self, quiesced: bool) -> list[Action]:
        """The sender's answer to StopTransfer, perhaps late."""
        if self.stage in (Stage.OPENING, Stage.RECEIVING, Stage.CLOSED):
            return []
        if quiesced and self._trusted:
            return self._finish(Proof.QUIESCED)
        return self._fence()

    def stop_failed(self) -> list[Action]:
        """StopTransfer got no answer in time, or one from another incarnation."""
        return self._fence() if self.stage is Stage.STOP_REQUESTED else []

    def peer_lost(self, reason: str) -> list[Action]:
        """The sending agent is taken for dead, or was restarted. It may only be slow: that is no proof of anything."""
        return self._fail(reason) if self.stage is not Stage.CLOSED else []

    # --- the owner ---------------------------------------------------------------------------------------------------

    def close(self, reason: str = "CLOSED") -> list[Action]:
        """The owner, or the end of its session, wants the memory back."""
        match self.stage:
            case Stage.OPENING:
                self._decide(Outcome.CANCELLED, reason)
                return []
            case Stage.RECEIVING:
                self._decide(Outcome.CANCELLED, reason)
                self.stage = Stage.STOP_REQUESTED
                return [AskStop()]
            case Stage.UNPROVEN:
                return self._fence()
            case _:
                return []

    def retry_fence(self) -> list[Action]:
        """Time for another attempt."""
        return self._fence() if self.stage is Stage.UNPROVEN else []

    # --- internals ---------------------------------------------------------------------------------------------------

    def _decide(self, outcome: Outcome, reason: str) -> None:
        """The first cause is the one that is reported."""
        if self._cause is None:
            self._cause = (outcome, reason)

    def _fail(self, reason: str) -> list[Action]:
        self._decide(Outcome.FAILED, reason)
        return self._fence() if self.stage in (Stage.RECEIVING, Stage.STOP_REQUESTED) else []

    def _fence(self) -> list[Action]:
        if self.stage is Stage.FENCING:
            return []
        self.stage = Stage.FENCING
        return [Fence()]

    def _finish(self, proof: Proof, whole: bool = True) -> list[Action]:
        if proof is Proof.FULL and whole and (self._cause is None or self._cause[0] is Outcome.FAILED):
            self._cause = (Outcome.DONE, "")
        actions = self._end(quiesced=True)
        self.stage, self.proof = Stage.CLOSED, proof
        return [*actions, Reusable(proof)]

    def _end(self, quiesced: bool) -> list[Action]:
        if self.ended is not None:
            return []
        assert self._cause is not None, "every end has a cause"
        self.ended = Ended(*self._cause, quiesced)
        return [self.ended]
