"""Sessions: from the first rank's hand-off until nothing can touch the memory any more and it is unmapped."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from baton_actors import handles
from baton_fabric.engine import FabricEngine
from baton_fabric.errors import FabricError
from baton_kv.regions import RegionMap
from baton_memory.handoff_server import HandoffServer, ReceivedHandoff
from baton_memory.offer import Handoff
from baton_telemetry.metrics import AgentMetrics

from .devices import Devices, RegionMemory, deregister, forget, register
from .domains import Domains
from .errors import SessionConflict, ShuttingDown, TooManySessions, UnknownSession
from .event_log import EventLog
from .messages import AddSession, EndSession
from .options import AgentOptions
from .receiver import Receiver
from .sender import Sender
from .session import Rank, Session, cache_of_offer, ready_event
from .wire import Cache
from .working import WorkingActor

logger = logging.getLogger(__name__)

# Ids of ended sessions, so that a late rank can't revive one.
MAX_ENDED = 1024
DEREGISTER_RETRY = 0.2


@dataclass(frozen=True)
class FindEvents:
    """Answered with the session's EventLog."""

    session: int


@dataclass(frozen=True)
class EndAll:
    """No hand-off is taken any more. Answered with a future that resolves when every session has ended."""

    reason: str


@dataclass(frozen=True)
class _Admit:
    """Before the memory is registered, which may take long: may this rank join?"""

    offer: Handoff
    cache: Cache
    connection: int


@dataclass(frozen=True)
class _Join:
    offer: Handoff
    rank: Rank


@dataclass(frozen=True)
class _GiveUp:
    """An admitted rank that did not come."""

    offer: Handoff
    connection: int


@dataclass(frozen=True)
class _Left:
    connection: int


@dataclass(frozen=True)
class _End:
    session: int
    reason: str


@dataclass(frozen=True)
class _Ended:
    session: int


@dataclass
class _Entry:
    session: Session
    # Admitted ranks whose memory is being registered: rank -> connection.
    coming: dict[int, int] = field(default_factory=dict)


class Sessions(WorkingActor):
    """Owns who is attached. The memory of a session goes only after sender and receiver say that it is quiet."""

    def __init__(
        self,
        incarnation: int,
        engine: FabricEngine,
        devices: Devices,
        domains: Domains,
        sender: Sender,
        receiver: Receiver,
        options: AgentOptions,
        metrics: AgentMetrics,
        handoff_path: str,
    ) -> None:
        super().__init__("sessions")
        self._incarnation = incarnation
        self._engine = engine
        self._devices = devices
        self._domains = domains
        self._sender = sender
        self._receiver = receiver
        self._options = options
        self._metrics = metrics
        self.server = HandoffServer(handoff_path, self.take, lambda connection: self.tell(_Left(connection)))
        self._entries: dict[int, _Entry] = {}
        self._by_connection: dict[int, int] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._closing: asyncio.Future[None] | None = None

    @property
    def count(self) -> int:
        return len(self._entries)

    @property
    def registered_bytes(self) -> int:
        return sum(rank.length for entry in self._entries.values() for rank in entry.session.ranks.values())

    async def take(self, received: ReceivedHandoff) -> dict[str, Any]:
        """The hand-off server's question. Raises SessionConflict, TooManySessions, ShuttingDown, FabricError, and the
        errors of GPU memory."""
        offer = received.offer
        cache = cache_of_offer(offer)
        await self.ask(_Admit(offer, cache, received.connection))
        try:
            rank = await self._register(received)
        except BaseException:
            self.tell(_GiveUp(offer, received.connection))
            raise
        try:
            await self.ask(_Join(offer, rank))
        except BaseException:
            await self._unregister([rank])
            raise
        return {"incarnation": self._incarnation}

    # --- ranks come -----------------------------------------------------------------------------------------------

    @handles
    async def admit(self, message: _Admit) -> None:
        offer = message.offer
        if self._closing is not None:
            raise ShuttingDown
        if offer.session in self._ended:
            raise SessionConflict(f"session {offer.session:#x} has ended: draw a new id", session=offer.session)
        entry = self._entries.get(offer.session)
        if entry is None:
            if len(self._entries) >= self._options.max_sessions:
                raise TooManySessions(self._options.max_sessions)
            log = EventLog(lambda: self.tell(_End(offer.session, "EVENTS_OVERFLOW")))
            entry = self._entries[offer.session] = _Entry(Session(offer.session, message.cache, log))
        if offer.rank in entry.coming:
            raise SessionConflict(
                f"rank {offer.rank} of session {offer.session:#x} is being registered", rank=offer.rank
            )
        entry.session.check(offer, message.cache)
        entry.coming[offer.rank] = message.connection

    @handles
    async def join_rank(self, message: _Join) -> None:
        offer, rank = message.offer, message.rank
        entry = self._entries.get(offer.session)
        if entry is None or entry.session.ending:
            self._forget_coming(offer)
            raise SessionConflict(f"session {offer.session:#x} has ended meanwhile", session=offer.session)
        session = entry.session
        del entry.coming[offer.rank]
        session.ranks[offer.rank] = rank
        self._by_connection[rank.connection] = offer.session
        if session.complete:
            view = session.view()
            self._sender.tell(AddSession(view))
            self._receiver.tell(AddSession(view))
            session.events.emit(session_ready=ready_event(view))
            logger.info("session %#x: memory of %d ranks attached", session.session, len(session.ranks))

    @handles
    async def give_up(self, message: _GiveUp) -> None:
        self._forget_coming(message.offer)

    # --- and go ---------------------------------------------------------------------------------------------------

    @handles
    async def left(self, message: _Left) -> None:
        session = self._by_connection.pop(message.connection, None)
        if session is not None:
            self._begin_end(session, "HANDOFF_CLOSED")

    @handles
    async def end(self, message: _End) -> None:
        self._begin_end(message.session, message.reason)

    @handles
    async def end_all(self, message: EndAll) -> asyncio.Future[None]:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_future()
        for session in list(self._entries):
            self._begin_end(session, message.reason)
        self._settle()
        return self._closing

    @handles
    async def ended(self, message: _Ended) -> None:
        entry = self._entries.pop(message.session)
        for rank in entry.session.ranks.values():
            self._by_connection.pop(rank.connection, None)
            # Tells the model processes that are still there.
            self.server.drop(rank.connection)
        self._ended[message.session] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        entry.session.events.end()
        logger.info("session %#x ended", message.session)
        self._settle()

    # --- the worker -----------------------------------------------------------------------------------------------

    @handles
    async def find_events(self, message: FindEvents) -> EventLog:
        """Raises UnknownSession."""
        entry = self._entries.get(message.session)
        if entry is None:
            raise UnknownSession(message.session)
        return entry.session.events

    # --- internals ------------------------------------------------------------------------------------------------

    def _begin_end(self, number: int, reason: str) -> None:
        entry = self._entries.get(number)
        if entry is None or entry.session.ending:
            return
        entry.session.ending = True
        self._metrics.sessions_ended.labels(reason.lower()).inc()
        logger.info("session %#x ends: %s", number, reason)
        self.spawn(self._drain(entry.session))

    async def _drain(self, session: Session) -> None:
        gone = EndSession(session.session)
        await asyncio.gather(await self._sender.ask(gone), await self._receiver.ask(gone))
        await self._unregister(list(session.ranks.values()))
        self.tell(_Ended(session.session))

    async def _register(self, received: ReceivedHandoff) -> Rank:
        offer = received.offer
        memories: list[RegionMemory] = []
        try:
            for region, fd in zip(offer.regions, received.region_fds, strict=True):
                length = int(region["length"])
                memory = await register(self._engine, self._devices, self._domains, fd, length, offer.device)
                memories.append(memory)
            # A GPU that moves the counter rings nothing.
            rung = offer.device is None
            counter = self._engine.attach_counter(received.counter_memory_fd, received.doorbell_fd, rung)
        except BaseException:
            for memory in memories:
                await deregister(self._engine, memory)
                self.spawn(forget(self._engine, memory))
            raise
        return Rank(received.connection, tuple(memories), RegionMap.split(offer.region_layers), counter)

    async def _unregister(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            self._engine.detach_counter(rank.counter)
            for memory in rank.memories:
                await self._deregister(memory)

    async def _deregister(self, memory: RegionMemory) -> None:
        while True:
            try:
                await deregister(self._engine, memory)
                self.spawn(forget(self._engine, memory))
                return
            except FabricError as error:
                # Mapped memory is safe memory: better kept than unmapped under a write.
                logger.error("region %d stays registered for now: %s", memory.registered.region, error)
                if error.reason != "REGION_IN_USE":
                    return
            await asyncio.sleep(DEREGISTER_RETRY)

    def _forget_coming(self, offer: Handoff) -> None:
        entry = self._entries.get(offer.session)
        if entry is None:
            return
        entry.coming.pop(offer.rank, None)
        if not entry.session.ranks and not entry.coming and not entry.session.ending:
            entry.session.events.end()
            del self._entries[offer.session]

    def _settle(self) -> None:
        if self._closing is not None and not self._entries and not self._closing.done():
            self._closing.set_result(None)
