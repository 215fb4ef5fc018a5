"""Receiving endpoints: one for each incarnation of a sending agent and group of domains, so that closing one, the
fence, is affordable."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from baton_fabric.engine import FabricEngine
from baton_kv.transfer.slots import SlotKey

from .wire import Peer

# Addresses of closed endpoints that are not used again; the oldest are forgotten first. tcp has some 28,000 ports.
MAX_RETIRED = 4096


@dataclass
class Endpoint:
    """`number`: the engine's id. `domains`: numbers of those that it is in. `addresses`: for the sender's connect, one
    in each. `closing`: a fence is under way."""

    number: int
    domains: tuple[int, ...]
    addresses: tuple[bytes, ...]
    sender: Peer
    inboxes: set[SlotKey] = field(default_factory=set)
    closing: bool = False
    used: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.sender.incarnation, self.domains

    def release(self, inbox: SlotKey) -> None:
        self.inboxes.discard(inbox)
        self.used = time.monotonic()


class Endpoints:
    """Belongs to the receiver."""

    def __init__(self, engine: FabricEngine) -> None:
        self._engine = engine
        self._all: dict[int, Endpoint] = {}
        # By the sender's incarnation and the domains; those that are closing, or could not be closed, are not among
        # them.
        self._healthy: dict[tuple[int, tuple[int, ...]], Endpoint] = {}
        self._retired: OrderedDict[bytes, None] = OrderedDict()

    def of_sender(self, sender: Peer, domains: tuple[int, ...]) -> tuple[Endpoint, list[int]]:
        """The sender's endpoint in these domains, opened when first used, and superfluous ones, which the caller closes
        at the engine.

        Its addresses are such as no closed endpoint had: a sender that was fenced while it stood still may connect to
        an old address again, and its writes would be as good as ever. Raises FabricError.
        """
        superfluous: list[int] = []
        endpoint = self._healthy.get((sender.incarnation, domains))
        if endpoint is None:
            number, addresses = self._engine.open_endpoint(domains)
            while not self._retired.keys().isdisjoint(addresses):
                # Still open while the next is opened, which so gets other addresses.
                superfluous.append(number)
                number, addresses = self._engine.open_endpoint(domains)
            endpoint = Endpoint(number, domains, tuple(addresses), sender)
            self._all[number] = self._healthy[endpoint.key] = endpoint
        endpoint.used = time.monotonic()
        return endpoint, superfluous

    def healthy(self, incarnation: int) -> list[Endpoint]:
        return [endpoint for endpoint in self._healthy.values() if endpoint.sender.incarnation == incarnation]

    def idle(self, since: float) -> list[Endpoint]:
        """Those without an inbox, and without one since that time (time.monotonic), that are not closing."""
        return [item for item in self._all.values() if not item.inboxes and not item.closing and item.used < since]

    def begin_close(self, endpoint: Endpoint) -> bool:
        """Gives it to nobody any more: whether the caller is to close it at the engine, or somebody does already."""
        if endpoint.closing:
            return False
        endpoint.closing = True
        if self._healthy.get(endpoint.key) is endpoint:
            del self._healthy[endpoint.key]
        self._retired.update(dict.fromkeys(endpoint.addresses))
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)
        return True

    def end_close(self, number: int, closed: bool) -> Endpoint:
        """What became of it; it may be tried again if it is not closed."""
        endpoint = self._all[number]
        endpoint.closing = False
        if closed:
            del self._all[number]
        return endpoint

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Whether it is not closed."""
        return endpoint.number in self._all
