"""The sending side: transfers, chunk plans, and the connections over which this agent writes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_actors import handles
from baton_fabric.engine import Chunk, FabricEngine
from baton_fabric.errors import FabricError
from baton_kv.immediate import wire_generation
from baton_kv.plan import LayoutMismatch
from baton_kv.transfer.outcome import Ended
from baton_kv.transfer.sending import Action, CancelWrites, Disconnect, TellReceiver
from baton_kv.transfer.tombstones import MAX_RECEIVERS, Tombstones
from baton_telemetry.metrics import AgentMetrics

from .checksums import Checksums
from .connections import Connection, Connections
from .errors import (
    AgentError,
    InvalidArgument,
    TooManyTransfers,
    TransferExists,
    TransferStopped,
    UnknownSession,
    UnknownTransfer,
)
from .fabric import FabricEvent
from .messages import AddSession, EndSession, PeerLost, Tick
from .options import AgentOptions
from .outgoing import Outgoing
from .peers import Peers, Watch
from .requests import CancelTransfer, OpenTransfer, StopTransfer, SubmitStep
from .session import SessionView
from .streams import plan_streams
from .wire import Peer, read_pages
from .working import WorkingActor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Confirmed:
    """The receiver's agent answered as the incarnation that the inbox names, or did not."""

    transfer: int
    error: Exception | None


@dataclass(frozen=True)
class _Summed:
    """The checksum of a transfer whose writes are delivered; None if none could be made."""

    transfer: int
    checksum: int | None
    stats: Any


@dataclass(frozen=True)
class _DrainExpired:
    transfer: int


class Sender(WorkingActor):
    """Owns every transfer."""

    def __init__(
        self,
        engine: FabricEngine,
        peers: Peers,
        options: AgentOptions,
        metrics: AgentMetrics,
        checksums: Checksums,
    ) -> None:
        super().__init__("sender")
        self._engine = engine
        self._checksums = checksums
        self._peers = peers
        self._options = options
        self._metrics = metrics
        self._last_number = 0
        self._sessions: dict[int, SessionView] = {}
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._transfers: dict[int, Outgoing] = {}
        self._by_inbox: dict[tuple[int, int, int], Outgoing] = {}
        self._tombstones = Tombstones()
        self._connections = Connections(engine)

    # --- what others may read -------------------------------------------------------------------------------------

    def needs(self, incarnation: int) -> bool:
        """Whether this agent may be writing to that one."""
        return any(transfer.inbox.receiver.incarnation == incarnation for transfer in self._transfers.values())

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)

    # --- sessions -------------------------------------------------------------------------------------------------

    @handles
    async def add_session(self, message: AddSession) -> None:
        self._sessions[message.view.session] = message.view

    @handles
    async def end_session(self, message: EndSession) -> asyncio.Future[None]:
        """Answered with a future that resolves when no write reads the session's memory any more."""
        self._sessions.pop(message.session, None)
        gone = self._leaving.setdefault(message.session, asyncio.get_running_loop().create_future())
        for transfer in list(self._transfers.values()):
            if transfer.view.session == message.session:
                self._do(transfer, transfer.life.cancel("SESSION_ENDED"))
        self._settle(message.session)
        return gone

    # --- the worker's calls ---------------------------------------------------------------------------------------

    @handles
    async def open_transfer(self, message: OpenTransfer) -> asyncio.Future[int]:
        """Raises UnknownSession, InvalidArgument, LayoutMismatch, TransferStopped, TransferExists,
        FabricError(CHECKSUM_UNSUPPORTED). The future: StaleDescriptor, PeerUnreachable, TransferStopped,
        FabricError."""
        view = self._sessions.get(message.session)
        if view is None:
            raise UnknownSession(message.session)
        inbox = message.inbox
        pages = read_pages(
            message.source_pages,
            message.destination_pages,
            view.cache.layout,
            inbox.cache.layout,
            message.prefix_tokens,
            self._options.max_pages,
        )
        if view.cache.dtype != inbox.cache.dtype:
            raise LayoutMismatch(
                f"dtype is {view.cache.dtype} at the source and {inbox.cache.dtype} at the destination", field="dtype"
            )
        if self._tombstones.is_dead(*inbox.key):
            raise TransferStopped(inbox.slot, inbox.generation)
        if inbox.key in self._by_inbox:
            raise TransferExists(inbox.slot, inbox.generation)
        if len(self._transfers) >= self._options.max_transfers:
            raise TooManyTransfers(self._options.max_transfers)
        if inbox.checksum:
            self._checksums.check_readable(view.region_ids(message.dp_rank))
        counter = view.ranks_of(message.dp_rank)[0].counter
        number = self._last_number + 1
        streams = plan_streams(view, message.dp_rank, inbox, number)
        self._last_number = number
        transfer = Outgoing(number, message, view, streams, counter, pages, asyncio.get_running_loop().create_future())
        self._transfers[number] = self._by_inbox[inbox.key] = transfer
        self.spawn(self._confirm(number, inbox.receiver))
        return transfer.opened

    @handles
    async def confirmed(self, message: _Confirmed) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            return
        error = message.error
        if error is None and self._tombstones.is_dead(*transfer.inbox.key):
            error = TransferStopped(transfer.inbox.slot, transfer.inbox.generation)
        if error is None and transfer.view.session not in self._sessions:
            error = UnknownSession(transfer.view.session)
        if error is None:
            try:
                self._open(transfer)
            except (FabricError, AgentError) as failure:
                error = failure
        if error is not None:
            # The worker hears of it as the answer to its call.
            transfer.quiet = True
            self._do(transfer, transfer.life.open_failed(str(getattr(error, "reason", "OPEN_FAILED"))))
            if not transfer.opened.done():
                transfer.opened.set_exception(error)
            return
        self._do(transfer, transfer.life.opened())
        self._peers.tell(Watch(transfer.inbox.receiver))
        if not transfer.opened.done():
            transfer.opened.set_result(transfer.number)

    @handles
    async def submit_step(self, message: SubmitStep) -> None:
        """Chunks of transfers that have ended are dropped. Raises UnknownSession, InvalidArgument, UnknownTransfer,
        FabricError; then no chunk of the step was taken."""
        view = self._sessions.get(message.session)
        if view is None:
            raise UnknownSession(message.session)
        layers = view.cache.layout.layers
        base = message.step * layers
        if base + layers >= 1 << 64:
            raise InvalidArgument(f"the layer counter does not reach step {message.step}: it has 64 bits", field="step")
        chunks: list[Chunk] = []
        for chunk in message.chunks:
            transfer = self._transfers.get(chunk.transfer)
            if transfer is None and 0 < chunk.transfer <= self._last_number:
                continue
            if transfer is None or transfer.view.session != message.session:
                raise UnknownTransfer(chunk.transfer)
            if transfer.life.accepts_chunks:
                chunks.append(Chunk(chunk.transfer, base, chunk.first_page, chunk.pages, chunk.last))
        if chunks:
            self._engine.submit_chunks(chunks)

    @handles
    async def cancel_transfer(self, message: CancelTransfer) -> asyncio.Future[bool]:
        """Raises UnknownTransfer for one that never was."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            if not 0 < message.transfer <= self._last_number:
                raise UnknownTransfer(message.transfer)
            ended.set_result(True)
            return ended
        if transfer.view.session != message.session:
            raise UnknownTransfer(message.transfer)
        transfer.quiet = True
        transfer.waiting.append(ended)
        self._do(transfer, transfer.life.cancel())
        return ended

    # --- other agents ---------------------------------------------------------------------------------------------

    @handles
    async def stop_transfer(self, message: StopTransfer) -> asyncio.Future[bool]:
        key = message.receiver, message.slot, message.generation
        quiesced: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Whether it is open, was open, or is still to come: it may not be opened any more.
        self._bury(key)
        transfer = self._by_inbox.get(key)
        if transfer is None:
            quiesced.set_result(self._tombstones.is_quiesced(*key))
        else:
            transfer.waiting.append(quiesced)
            self._do(transfer, transfer.life.stop())
        return quiesced

    @handles
    async def peer_lost(self, message: PeerLost) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.inbox.receiver.incarnation == message.peer.incarnation:
                self._do(transfer, transfer.life.peer_lost(message.reason))
        for connection in self._connections.of_agent(message.peer.incarnation):
            self._drop(connection)

    # --- the engine -----------------------------------------------------------------------------------------------

    @handles
    async def fabric_event(self, message: FabricEvent) -> None:
        event = message.event
        if message.kind == "PeerFailed":
            self._peer_failed(event.peer, event.reason, event.detail)
            return
        transfer = self._transfers.get(event.transfer)
        if transfer is None:
            return
        if message.kind == "TransferDone":
            self._metrics.transfer_seconds.observe(event.stats.duration_us / 1e6)
            self._metrics.first_post_seconds.observe(event.stats.first_post_us / 1e6)
            if event.stats.writes:
                self._metrics.extents_per_write.observe(event.stats.extents / event.stats.writes)
            if transfer.inbox.checksum:
                transfer.summing = True
                self.spawn(self._sum(transfer, event.stats))
            else:
                self._do(transfer, transfer.life.done(), event.stats)
        elif message.kind == "TransferCancelled":
            self._do(transfer, transfer.life.cancelled(event.quiesced))
        else:
            self._do(transfer, transfer.life.failed(event.reason, event.quiesced))

    @handles
    async def summed(self, message: _Summed) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            return
        if message.checksum is None:
            self._do(transfer, transfer.life.failed("CHECKSUM_FAILED", True))
            return
        self._peers.transfer_checksum(
            transfer.inbox.receiver, transfer.inbox.slot, transfer.inbox.generation, message.checksum
        )
        self._do(transfer, transfer.life.done(), message.stats)

    @handles
    async def drain_expired(self, message: _DrainExpired) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is not None and not transfer.summing:
            logger.warning("transfer %d did not drain in time", message.transfer)
            self._do(transfer, transfer.life.drain_expired())

    @handles
    async def tick(self, _: Tick) -> None:
        for connection in self._connections.idle(time.monotonic() - self._options.idle_timeout):
            self._drop(connection)

    # --- carrying out ---------------------------------------------------------------------------------------------

    def _do(self, transfer: Outgoing, actions: Sequence[Action], stats: Any = None) -> None:
        receiver = transfer.inbox.receiver
        for action in actions:
            match action:
                case CancelWrites():
                    self._engine.cancel_transfer(transfer.number)
                    self.spawn(self._expire(transfer.number))
                case Disconnect():
                    if transfer.connection is not None:
                        self._drop(transfer.connection)
                case TellReceiver(reason, quiesced):
                    self._peers.transfer_aborted(
                        receiver, transfer.inbox.slot, transfer.inbox.generation, reason, quiesced
                    )
                case Ended():
                    self._end(transfer, action, stats)

    def _end(self, transfer: Outgoing, ended: Ended, stats: Any) -> None:
        del self._transfers[transfer.number], self._by_inbox[transfer.inbox.key]
        self._bury(transfer.inbox.key, ended.quiesced)
        if transfer.connection is not None:
            transfer.connection.release(transfer.number)
        self._metrics.transfers.labels(ended.outcome.value).inc()
        transfer.tell(ended, stats)
        self._settle(transfer.view.session)

    def _bury(self, key: tuple[int, int, int], quiesced: bool = True) -> None:
        self._tombstones.bury(*key, quiesced=quiesced)
        if len(self._tombstones) > MAX_RECEIVERS:
            self._tombstones.forget({transfer.inbox.receiver.incarnation for transfer in self._transfers.values()})

    def _settle(self, session: int) -> None:
        leaving = self._leaving.get(session)
        if leaving is not None and not any(t.view.session == session for t in self._transfers.values()):
            del self._leaving[session]
            if not leaving.done():
                leaving.set_result(None)

    # --- connections ----------------------------------------------------------------------------------------------

    def _open(self, transfer: Outgoing) -> None:
        """Raises FabricError."""
        domains = transfer.view.domains(transfer.request.dp_rank)
        connection = self._connections.to(transfer.inbox, domains)
        try:
            self._open_over(transfer, connection)
        except FabricError as error:
            if error.reason not in ("PEER_FAILED", "UNKNOWN_PEER"):
                raise
            # The connection had broken while nobody used it.
            self._drop(connection)
            self._open_over(transfer, self._connections.to(transfer.inbox, domains))

    def _open_over(self, transfer: Outgoing, connection: Connection) -> None:
        view, inbox = transfer.view, transfer.inbox
        self._engine.open_transfer(
            transfer.number,
            connection.peer,
            inbox.slot,
            wire_generation(inbox.generation),
            transfer.counter,
            view.cache.layout.layers,
            transfer.streams,
            *transfer.pages,
        )
        transfer.connection = connection
        connection.transfers.add(transfer.number)

    def _drop(self, connection: Connection) -> None:
        """Idempotent. The engine ends the transfers that were on it, each with an event of its own."""
        if self._connections.drop(connection):
            self.spawn(self._disconnect(connection.peer))

    def _peer_failed(self, peer: int, reason: str, detail: str) -> None:
        connection = self._connections.of_peer(peer)
        if connection is None:
            return
        logger.warning("connection to agent %#018x failed: %s (%s)", connection.key[0], reason, detail)
        for number in connection.transfers:
            # The connection says nothing about the agent behind it: ask.
            self._peers.tell(Watch(self._transfers[number].inbox.receiver, at_once=True))
            break
        self._drop(connection)

    async def _disconnect(self, peer: int) -> None:
        try:
            await self._engine.disconnect(peer)
        except FabricError as error:
            # It takes effect once the provider returns; until then the agent's health says what is wrong.
            logger.error("connection %d could not be closed: %s", peer, error)

    async def _confirm(self, number: int, receiver: Peer) -> None:
        error: Exception | None = None
        try:
            await self._peers.confirm(receiver)
        except AgentError as failure:
            error = failure
        self.tell(_Confirmed(number, error))

    async def _sum(self, transfer: Outgoing, stats: Any) -> None:
        checksum: int | None = None
        try:
            checksum = await self._checksums.of_source(transfer.view, transfer.streams, transfer.pages)
        except FabricError as error:
            logger.error("no checksum of transfer %d: %s", transfer.number, error)
        self.tell(_Summed(transfer.number, checksum, stats))

    async def _expire(self, number: int) -> None:
        await asyncio.sleep(self._options.drain_timeout)
        self.tell(_DrainExpired(number))
