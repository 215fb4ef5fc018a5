"""The agent's hold on the native engine: calls that may take long leave the event loop, events come into it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton_fabric.errors import FabricError

if TYPE_CHECKING:
    from baton_fabric._native import Engine

logger = logging.getLogger(__name__)

# Events of the native core by the side that they concern.
RECEIVING = frozenset({"InboxFull", "InboxViolation"})
SENDING = frozenset({"TransferDone", "TransferFailed", "TransferCancelled", "PeerFailed"})


@dataclass(frozen=True)
class FabricEvents:
    """Events for one actor, oldest first."""

    events: Sequence[Any]


class Fabric:
    """`engine` is called directly where a call takes microseconds; the slow ones are here."""

    def __init__(
        self,
        engine: Engine,
        receiving: Callable[[FabricEvents], None],
        sending: Callable[[FabricEvents], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self._receiving = receiving
        self._sending = sending
        self._on_failed = on_failed

    def start(self) -> None:
        """Events are delivered from now on."""
        asyncio.get_running_loop().add_reader(self.engine.event_fd, self.deliver)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self.engine.event_fd)

    def deliver(self) -> None:
        """Hands out what there is now. Also called by whoever needs all that came before some point in time."""
        events = self.engine.events()
        receiving = [event for event in events if type(event).__name__ in RECEIVING]
        sending = [event for event in events if type(event).__name__ in SENDING]
        if receiving:
            self._receiving(FabricEvents(receiving))
        if sending:
            self._sending(FabricEvents(sending))
        for event in events:
            if type(event).__name__ == "EngineFailed":
                detail = str(getattr(event, "detail", ""))
                logger.critical("the native engine failed: %s", detail)
                self._on_failed(detail)

    async def register(self, fd: int, length: int) -> tuple[int, int, int]:
        """(region, key, base). Raises FabricError."""
        return await asyncio.to_thread(self.engine.register_region, fd, length)

    async def deregister(self, region: int) -> None:
        """Raises FabricError, with REGION_IN_USE while a write may still touch it."""
        await asyncio.to_thread(self.engine.deregister_region, region)

    async def fence(self, endpoint: int) -> None:
        """Once this returns, no byte can land that was sent to the endpoint, and every inbox of it that became full
        has been delivered. Raises FabricError if the endpoint could not be closed."""
        try:
            await asyncio.to_thread(self.engine.close_endpoint, endpoint)
        except FabricError as error:
            # A former attempt may have succeeded after its answer was given up.
            if error.reason != "UNKNOWN_ENDPOINT":
                raise
        self.deliver()
