"""The receiving side: inboxes, their slots, and the endpoints over which other agents write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.v1 import agent_pb2, common_pb2

from baton_actors import handles
from baton_fabric.engine import FabricEngine
from baton_fabric.errors import FabricError
from baton_kv.immediate import wire_generation
from baton_kv.transfer.inbox import Action, AskStop, Fence, Reusable, Stage
from baton_kv.transfer.outcome import Ended, Outcome, Proof
from baton_kv.transfer.slots import SlotKey, SlotNotInUse, SlotTable
from baton_rpc.layouts import layout_message
from baton_telemetry.metrics import AgentMetrics

from .checksums import Checksums, Part
from .endpoints import Endpoint, Endpoints
from .errors import StaleDescriptor, UnknownInbox, UnknownSession
from .fabric import FabricEvent
from .incoming import Incoming
from .messages import AddSession, EndSession, PeerLost, Tick
from .options import AgentOptions
from .peers import Peers, Watch
from .requests import Aborted, CloseInbox, OpenInbox, Summed
from .session import SessionView
from .wire import INBOX_VERSION, Peer, sharding_message
from .working import WorkingActor

logger = logging.getLogger(__name__)

# Where an inbox is to end, but may still be written.
QUARANTINE = (Stage.STOP_REQUESTED, Stage.FENCING, Stage.UNPROVEN)


@dataclass(frozen=True)
class _Compared:
    """None: no checksum could be made here."""

    key: SlotKey
    checksum: int | None


@dataclass(frozen=True)
class _StopAnswered:
    key: SlotKey
    quiesced: bool


@dataclass(frozen=True)
class _FenceEnded:
    """`full`: whether the inbox had everything; then its InboxFull, or InboxViolation, is under way or was here. None:
    the endpoint is not closed."""

    endpoint: int
    full: Callable[[SlotKey], bool] | None


class Receiver(WorkingActor):
    """Owns every inbox."""

    def __init__(
        self,
        agent: common_pb2.AgentDescriptor,
        engine: FabricEngine,
        peers: Peers,
        options: AgentOptions,
        metrics: AgentMetrics,
        checksums: Checksums,
    ) -> None:
        super().__init__("receiver")
        self._checksums = checksums
        self._agent = agent
        self._engine = engine
        self._peers = peers
        self._options = options
        self._metrics = metrics
        self._slots = SlotTable(options.slots)
        self._sessions: dict[int, SessionView] = {}
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._inboxes: dict[SlotKey, Incoming] = {}
        # By slot, as the engine names inboxes: it knows 8 bits of the generation only.
        self._by_slot: dict[int, Incoming] = {}
        self._endpoints = Endpoints(engine)

    # --- what others may read -------------------------------------------------------------------------------------

    def needs(self, incarnation: int) -> bool:
        """Whether that agent may be writing here."""
        return any(inbox.endpoint.sender.incarnation == incarnation for inbox in self._inboxes.values())

    @property
    def open_inboxes(self) -> int:
        return len(self._inboxes)

    def quarantined(self, stage: Stage) -> int:
        """Inboxes that are to end, but may still be written, in one stage of QUARANTINE."""
        return sum(inbox.life.stage is stage for inbox in self._inboxes.values())

    def oldest_quarantine(self) -> float:
        """Seconds."""
        since = [inbox.since for inbox in self._inboxes.values() if inbox.life.stage in QUARANTINE]
        return time.monotonic() - min(since) if since else 0.0

    # --- sessions -------------------------------------------------------------------------------------------------

    @handles
    async def add_session(self, message: AddSession) -> None:
        self._sessions[message.view.session] = message.view

    @handles
    async def end_session(self, message: EndSession) -> asyncio.Future[None]:
        self._sessions.pop(message.session, None)
        gone = self._leaving.setdefault(message.session, asyncio.get_running_loop().create_future())
        for inbox in [inbox for inbox in self._inboxes.values() if inbox.session.session == message.session]:
            self._close(inbox, "SESSION_ENDED")
        self._settle(message.session)
        return gone

    # --- the worker's calls ---------------------------------------------------------------------------------------

    @handles
    async def open_inbox(self, message: OpenInbox) -> agent_pb2.InboxDescriptor:
        """Raises UnknownSession, InvalidArgument, StaleDescriptor, InvalidKvArgument, SlotsExhausted, FabricError."""
        view = self._sessions.get(message.session)
        if view is None:
            raise UnknownSession(message.session)
        regions = view.region_ids(message.dp_rank)
        if self._peers.is_dead(message.sender.incarnation):
            raise StaleDescriptor(message.sender.incarnation, message.sender.address)
        checked = None
        if message.checked is not None:
            self._checksums.check_readable(regions)
            checked = self._checksums.destination(view, message.dp_rank, *message.checked)
        endpoint, superfluous = self._endpoints.of_sender(message.sender, view.domains(message.dp_rank))
        for number in superfluous:
            self.spawn(self._discard(number))
        key = self._slots.open()
        inbox = Incoming(key, view, endpoint, checked=checked)
        try:
            self._engine.open_inbox(
                endpoint.number, key.slot, wire_generation(key.generation), message.expected, regions
            )
        except FabricError:
            self._slots.release(*key, Proof.QUIESCED)
            raise
        self._inboxes[key] = self._by_slot[key.slot] = inbox
        endpoint.inboxes.add(key)
        self._do(inbox, inbox.life.opened())
        self._peers.tell(Watch(message.sender))
        return agent_pb2.InboxDescriptor(
            version=INBOX_VERSION,
            receiver=self._agent,
            slot=key.slot,
            generation=key.generation,
            endpoints=endpoint.addresses,
            domains=endpoint.domains,
            regions=view.regions,
            layout=layout_message(view.cache.layout, view.cache.dtype, view.cache.shards.heads),
            sharding=sharding_message(view.cache),
            data_parallel_rank=message.dp_rank,
            sender_incarnation=message.sender.incarnation,
            checksum=agent_pb2.CHECKSUM_UNSPECIFIED if checked is None else agent_pb2.CHECKSUM_CRC32C,
        )

    @handles
    async def close_inbox(self, message: CloseInbox) -> asyncio.Future[Proof]:
        """Raises UnknownInbox."""
        answer: asyncio.Future[Proof] = asyncio.get_running_loop().create_future()
        key = SlotKey(message.slot, message.generation)
        inbox = self._inboxes.get(key)
        if inbox is None:
            try:
                answer.set_result(self._slots.proof(*key) or Proof.QUIESCED)
            except SlotNotInUse as error:
                raise UnknownInbox(message.slot, message.generation) from error
        elif inbox.session.session != message.session:
            raise UnknownInbox(message.slot, message.generation)
        else:
            inbox.waiting.append(answer)
            self._close(inbox, "CLOSED")
        return answer

    # --- other agents ---------------------------------------------------------------------------------------------

    @handles
    async def aborted(self, message: Aborted) -> None:
        inbox = self._inboxes.get(SlotKey(message.slot, message.generation))
        if inbox is None or inbox.endpoint.sender.incarnation != message.sender:
            return
        self._do(inbox, inbox.life.aborted(message.reason, message.quiesced), "sender_not_quiesced")

    @handles
    async def summed(self, message: Summed) -> None:
        inbox = self._inboxes.get(SlotKey(message.slot, message.generation))
        if inbox is None or inbox.endpoint.sender.incarnation != message.sender or inbox.checksum is not None:
            return
        inbox.checksum = message.checksum
        self._compare(inbox)

    @handles
    async def compared(self, message: _Compared) -> None:
        inbox = self._inboxes.get(message.key)
        if inbox is None:
            return
        if message.checksum is None:
            self._metrics.checksums.labels("failed").inc()
            self._do(inbox, inbox.life.mismatched("CHECKSUM_FAILED"))
        elif message.checksum != inbox.checksum:
            logger.error(
                "slot %d: checksum %#x, the sender's is %#x", message.key.slot, message.checksum, inbox.checksum
            )
            self._metrics.checksums.labels("mismatch").inc()
            self._do(inbox, inbox.life.mismatched())
        else:
            self._metrics.checksums.labels("match").inc()
            self._do(inbox, inbox.life.full())

    @handles
    async def peer_lost(self, message: PeerLost) -> None:
        for inbox in list(self._inboxes.values()):
            if inbox.endpoint.sender.incarnation == message.peer.incarnation:
                self._do(inbox, inbox.life.peer_lost(message.reason), message.reason.lower())
        for endpoint in self._endpoints.healthy(message.peer.incarnation):
            if not endpoint.inboxes:
                self._fence(endpoint, "idle")

    @handles
    async def stop_answered(self, message: _StopAnswered) -> None:
        inbox = self._inboxes.get(message.key)
        if inbox is not None:
            answered = inbox.life.stop_answered(True) if message.quiesced else inbox.life.stop_failed()
            self._do(inbox, answered, "stop_unconfirmed")

    # --- the engine -----------------------------------------------------------------------------------------------

    @handles
    async def fabric_event(self, message: FabricEvent) -> None:
        event = message.event
        inbox = self._by_slot.get(event.slot)
        if inbox is None or wire_generation(inbox.key.generation) != event.generation:
            return
        if message.kind == "InboxFull":
            inbox.full = event
            if inbox.checked is None:
                self._do(inbox, inbox.life.full())
            else:
                self._compare(inbox)
        else:
            logger.error("slot %d: %d extents came, %d were expected", event.slot, event.extents, event.expected)
            inbox.violated = True
            self._do(inbox, inbox.life.violated(), "too_many_extents")
            if inbox.endpoint not in self._endpoints:
                self._do(inbox, inbox.life.fenced())

    @handles
    async def fence_ended(self, message: _FenceEnded) -> None:
        endpoint = self._endpoints.end_close(message.endpoint, message.full is not None)
        for inbox in [self._inboxes[key] for key in endpoint.inboxes]:
            if message.full is None:
                self._do(inbox, inbox.life.fence_failed())
                inbox.answer_unproven()
            # One that waits for a checksum might wait for ever now.
            elif inbox.violated or inbox.checked is not None or not message.full(inbox.key):
                self._do(inbox, inbox.life.fenced())

    @handles
    async def tick(self, _: Tick) -> None:
        for inbox in list(self._inboxes.values()):
            self._do(inbox, inbox.life.retry_fence(), "retry")
        for endpoint in self._endpoints.idle(time.monotonic() - self._options.idle_timeout):
            self._fence(endpoint, "idle")

    # --- carrying out ---------------------------------------------------------------------------------------------

    def _do(self, inbox: Incoming, actions: Sequence[Action], why: str = "") -> None:
        """`why`: the label of a fence, should the actions hold one."""
        for action in actions:
            match action:
                case AskStop():
                    inbox.since = time.monotonic()
                    self.spawn(self._ask_sender(inbox.key, inbox.endpoint.sender))
                case Fence():
                    inbox.since = inbox.since or time.monotonic()
                    self._fence(inbox.endpoint, why)
                case Ended():
                    if action.outcome is Outcome.DONE:
                        self._metrics.inbox_fill_seconds.observe(inbox.fill_ns / 1e9)
                    inbox.tell(action)
                case Reusable(proof):
                    self._free(inbox, proof)

    def _free(self, inbox: Incoming, proof: Proof) -> None:
        self._engine.close_inbox(inbox.key.slot, wire_generation(inbox.key.generation))
        del self._inboxes[inbox.key], self._by_slot[inbox.key.slot]
        inbox.endpoint.release(inbox.key)
        self._slots.release(*inbox.key, proof)
        self._metrics.inboxes.labels(proof.value).inc()
        inbox.answer(proof)
        self._settle(inbox.session.session)

    def _close(self, inbox: Incoming, reason: str) -> None:
        self._do(inbox, inbox.life.close(reason), "retry")

    def _settle(self, session: int) -> None:
        leaving = self._leaving.get(session)
        if leaving is not None and not any(inbox.session.session == session for inbox in self._inboxes.values()):
            del self._leaving[session]
            if not leaving.done():
                leaving.set_result(None)

    # --- endpoints ------------------------------------------------------------------------------------------------

    async def _discard(self, number: int) -> None:
        with contextlib.suppress(FabricError):
            await self._engine.close_endpoint(number)

    def _fence(self, endpoint: Endpoint, reason: str) -> None:
        if not self._endpoints.begin_close(endpoint):
            return
        if endpoint.inboxes:
            self._metrics.fences.labels(reason).inc()
            logger.warning("fencing agent %#018x: %s", endpoint.sender.incarnation, reason)
        # Everything on the endpoint shares its fate from here on.
        for key in list(endpoint.inboxes):
            inbox = self._inboxes[key]
            self._do(inbox, inbox.life.peer_lost("ENDPOINT_FENCED"))
        self.spawn(self._close_endpoint(endpoint.number))

    async def _close_endpoint(self, number: int) -> None:
        try:
            unfilled = {(slot, generation) for slot, generation in await self._engine.close_endpoint(number)}
        except FabricError as error:
            if error.reason != "UNKNOWN_ENDPOINT":
                logger.error("endpoint %d could not be closed: %s", number, error)
                self.tell(_FenceEnded(number, None))
                return
            # A former attempt succeeded after its answer was given up; what it found is not known any more.
            self.tell(_FenceEnded(number, lambda _: False))
        else:
            self.tell(_FenceEnded(number, lambda key: (key.slot, wire_generation(key.generation)) not in unfilled))

    def _compare(self, inbox: Incoming) -> None:
        """Once both are here: the last extent, and the sender's checksum."""
        if inbox.checked is not None and inbox.full is not None and inbox.checksum is not None:
            self.spawn(self._sum(inbox.key, inbox.session, inbox.checked))

    async def _sum(self, key: SlotKey, session: SessionView, parts: list[Part]) -> None:
        checksum: int | None = None
        try:
            checksum = await self._checksums.of_destination(session, parts)
        except FabricError as error:
            logger.error("no checksum of slot %d: %s", key.slot, error)
        self.tell(_Compared(key, checksum))

    async def _ask_sender(self, key: SlotKey, sender: Peer) -> None:
        self.tell(_StopAnswered(key, await self._peers.stop_transfer(sender, *key)))
