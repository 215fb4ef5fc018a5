"""Peers of the engine: one for each endpoint that another agent opened for this one, kept while it is used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_fabric.engine import FabricEngine

from .wire import RemoteInbox


@dataclass
class Connection:
    """`peer`: the engine's id. `key`: the receiver's incarnation and the fabric addresses of its endpoint."""

    peer: int
    key: tuple[int, tuple[bytes, ...]]
    transfers: set[int] = field(default_factory=set)
    used: float = field(default_factory=time.monotonic)

    def release(self, transfer: int) -> None:
        self.transfers.discard(transfer)
        self.used = time.monotonic()


class Connections:
    """Belongs to the sender."""

    def __init__(self, engine: FabricEngine) -> None:
        self._engine = engine
        self._by_key: dict[tuple[int, tuple[bytes, ...]], Connection] = {}
        self._by_peer: dict[int, Connection] = {}

    def to(self, inbox: RemoteInbox, domains: Sequence[int]) -> Connection:
        """Connects from these domains of ours, or takes the connection that is there. Raises FabricError."""
        key = inbox.receiver.incarnation, inbox.endpoints
        connection = self._by_key.get(key)
        if connection is None:
            connection = Connection(self._engine.connect(inbox.endpoints, domains), key)
            self._by_key[key] = self._by_peer[connection.peer] = connection
        return connection

    def of_peer(self, peer: int) -> Connection | None:
        """The connection with the engine's id `peer`, unless it was dropped."""
        return self._by_peer.get(peer)

    def of_agent(self, incarnation: int) -> list[Connection]:
        return [connection for connection in self._by_key.values() if connection.key[0] == incarnation]

    def idle(self, since: float) -> list[Connection]:
        """Those without a transfer, and without one since that time (time.monotonic)."""
        return [item for item in self._by_key.values() if not item.transfers and item.used < since]

    def drop(self, connection: Connection) -> bool:
        """Forgets it: whether it was there. The caller disconnects it at the engine then."""
        if self._by_peer.pop(connection.peer, None) is None:
            return False
        del self._by_key[connection.key]
        return True
