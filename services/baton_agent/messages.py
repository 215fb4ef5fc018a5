"""Messages that more than one actor handles."""

from __future__ import annotations

from dataclasses import dataclass

from .session import SessionView
from .wire import Peer


@dataclass(frozen=True)
class AddSession:
    """All ranks are there."""

    view: SessionView


@dataclass(frozen=True)
class EndSession:
    """Answered with a future that resolves when no write of this side can touch the session's memory any more."""

    session: int


@dataclass(frozen=True)
class PeerLost:
    """Another agent was restarted, or has been silent for too long. No proof that it does not write any more."""

    peer: Peer
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time for what nobody asks for: attempts to repeat, connections that nobody uses."""
