"""A transfer at its sender: what the agent knows of it, and what its worker is told in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.v1 import agent_pb2, common_pb2

from baton_fabric.engine import Stream
from baton_kv.transfer.outcome import Ended, Outcome
from baton_kv.transfer.sending import TransferLife

from .connections import Connection
from .requests import OpenTransfer
from .session import SessionView
from .wire import RemoteInbox


@dataclass
class Outgoing:
    """One transfer. `number`: its id."""

    number: int
    request: OpenTransfer
    view: SessionView
    streams: list[Stream]
    # The engine's id.
    counter: int
    # Source and destination, one for one, in the smaller pages of the two.
    pages: tuple[Sequence[int], Sequence[int]]
    opened: asyncio.Future[int]
    life: TransferLife = field(default_factory=TransferLife)
    connection: Connection | None = None
    # Every write is delivered, and the checksum is being made.
    summing: bool = False
    # The worker asked for the end: the answer to its call is what it hears of it.
    quiet: bool = False
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    @property
    def inbox(self) -> RemoteInbox:
        return self.request.inbox

    def tell(self, ended: Ended, stats: Any) -> None:
        """Its end, to the worker, unless that has asked for it, and to those who wait for it. `stats`: of the engine,
        if it is done."""
        if not self.quiet and ended.outcome is Outcome.DONE:
            self.view.events.emit(transfer_done=agent_pb2.TransferDone(transfer=self.number, stats=_stats(stats)))
        elif not self.quiet:
            self.view.events.emit(
                transfer_failed=agent_pb2.TransferFailed(
                    transfer=self.number, reason=ended.reason, quiesced=ended.quiesced
                )
            )
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_result(ended.quiesced)


def _stats(stats: Any) -> common_pb2.TransferStats:
    names = ("bytes", "pages", "extents", "writes", "duration_us", "overlapped_us", "exposed_us", "first_post_us")
    return common_pb2.TransferStats(**{name: getattr(stats, name) for name in names})
