"""What workers and other agents ask of the sender and of the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .wire import Peer, RemoteInbox

# --- of the receiver --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenInbox:
    """Answered with the InboxDescriptor."""

    session: int
    sender: Peer
    expected: int
    # What the checksum covers, if there is to be one: destination pages, and positions from the first one's beginning.
    checked: tuple[Sequence[int], int] | None = None
    # Of this session: whose memory is written.
    dp_rank: int = 0


@dataclass(frozen=True)
class CloseInbox:
    """Answered with a future of a Proof, which may fail with FenceFailed."""

    session: int
    slot: int
    generation: int


@dataclass(frozen=True)
class Aborted:
    """What a sending agent said about one of its transfers."""

    sender: int
    slot: int
    generation: int
    reason: str
    quiesced: bool


@dataclass(frozen=True)
class Summed:
    """A sending agent's checksum of what it delivered."""

    sender: int
    slot: int
    generation: int
    checksum: int


# --- of the sender ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenTransfer:
    """Answered with a future of the transfer's id."""

    session: int
    inbox: RemoteInbox
    source_pages: Sequence[int]
    destination_pages: Sequence[int]
    # What the lists leave out, because the destination has it.
    prefix_tokens: int = 0
    # Of this session: whose memory is read.
    dp_rank: int = 0


@dataclass(frozen=True)
class PlanChunk:
    transfer: int
    first_page: int
    pages: int
    last: bool


@dataclass(frozen=True)
class SubmitStep:
    session: int
    step: int
    chunks: Sequence[PlanChunk]


@dataclass(frozen=True)
class CancelTransfer:
    """Answered with a future that resolves once none of the transfer's writes reads the session's memory."""

    session: int
    transfer: int


@dataclass(frozen=True)
class StopTransfer:
    """From the receiving agent. Answered with a future: whether no write can follow."""

    receiver: int
    slot: int
    generation: int
