"""Events of the fabric engine on their way to the actor that they concern."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_fabric.engine import FabricEngine

logger = logging.getLogger(__name__)

# By name, not by class: nobody but the native core can make its events, so a fake engine has its own of the same names.
_RECEIVING = frozenset({"InboxFull", "InboxViolation"})


@dataclass(frozen=True)
class FabricEvent:
    event: Any

    @property
    def kind(self) -> str:
        return type(self.event).__name__


async def deliver(
    engine: FabricEngine,
    receiving: Callable[[FabricEvent], None],
    sending: Callable[[FabricEvent], None],
    on_failed: Callable[[str], None],
) -> None:
    """Until the engine is closed."""
    async for event in engine.events():
        message = FabricEvent(event)
        if message.kind == "EngineFailed":
            detail = str(getattr(event, "detail", ""))
            logger.critical("the native engine failed: %s", detail)
            on_failed(detail)
        elif message.kind in _RECEIVING:
            receiving(message)
        else:
            sending(message)
