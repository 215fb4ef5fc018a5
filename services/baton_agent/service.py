"""The transfer agent as a whole: what is built, in which order it starts, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

from baton_actors import Actor, ActorStopped
from baton_fabric.engine import FabricEngine
from baton_memory.cuda import NoGpu
from baton_memory.sockets import check_socket_path, clear_stale_socket
from baton_rpc import RpcServer, TlsFiles, UnixAddress, advertised_address, parse_address
from baton_telemetry.metrics import AgentMetrics

from .checksums import Checksums
from .devices import Devices
from .domains import Domains
from .errors import EngineDown, InvalidArgument
from .fabric import deliver
from .messages import PeerLost, Tick
from .options import AgentOptions
from .peers import Peers
from .receiver import QUARANTINE, Receiver
from .sender import Sender
from .servicers import TransferAgentServicer, TransferPeerServicer
from .sessions import EndAll, Sessions
from .wire import AGENT_VERSION

logger = logging.getLogger(__name__)

TICK = 1.0
# The progress thread never works this long at a time; then it hangs inside the provider.
STALLED = 10.0


@dataclass(frozen=True)
class Addresses:
    """Where the agent listens. `socket`: "unix:path" for workers; `handoff`: path for model processes; `control`:
    host:port for other agents; `advertise_host`: how they reach it, where that is not the host of `control`."""

    socket: str
    handoff: str
    control: str
    advertise_host: str | None = None


class TransferAgentService:
    """One agent. `failed` resolves if it can't go on: its owner then stops it and lets the process end."""

    def __init__(
        self,
        engine: FabricEngine,
        transport: str,
        node: str,
        addresses: Addresses,
        options: AgentOptions | None = None,
        metrics: AgentMetrics | None = None,
        tls: TlsFiles | None = None,
        allow_insecure: bool = False,
        devices: Devices | None = None,
        domains: Domains | None = None,
    ) -> None:
        """`transport`: the name that both sides of a transfer must share; `devices`: GPUs whose memory may be handed
        over, none by default; `domains`: which of the engine's serve whose memory, all by default. Raises the address
        errors of baton_rpc, InsecureAddressError, and SocketPathInvalid for a path that is too long."""
        self.incarnation = secrets.randbits(64) or 1
        self.options = options or AgentOptions()
        self.metrics = metrics or AgentMetrics()
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._addresses = addresses
        self._socket_path = _socket_path(addresses.socket)
        check_socket_path(addresses.handoff)
        if isinstance(parse_address(addresses.control), UnixAddress):
            raise InvalidArgument(
                f"other agents are served on a TCP address only, not at {addresses.control!r}: write host:port",
                field="agent.control",
            )
        self.descriptor = common_pb2.AgentDescriptor(
            version=AGENT_VERSION, incarnation=self.incarnation, transport=transport, node=node
        )
        self._engine = engine
        self._domains = domains or Domains.everywhere(
            [str(domain["address"] or domain["domain"]) for domain in engine.capabilities()]
        )
        credentials: grpc.ChannelCredentials | None = tls.channel_credentials() if tls is not None else None
        self.peers = Peers(
            self.incarnation,
            self.options,
            credentials,
            self._needed,
            self._peer_lost,
            self.metrics.heartbeat_misses.inc,
        )
        self._checksums = Checksums(self._engine)
        self.receiver = Receiver(self.descriptor, self._engine, self.peers, self.options, self.metrics, self._checksums)
        self.sender = Sender(self._engine, self.peers, self.options, self.metrics, self._checksums)
        self.sessions = Sessions(
            self.incarnation,
            self._engine,
            devices or Devices(NoGpu("this agent was started without GPUs")),
            self._domains,
            self.sender,
            self.receiver,
            self.options,
            self.metrics,
            addresses.handoff,
        )
        self._local = RpcServer([addresses.socket])
        self._control = RpcServer([addresses.control], tls=tls, allow_insecure=allow_insecure)
        self._local.add(
            agent_pb2_grpc.add_TransferAgentServicer_to_server,
            TransferAgentServicer(
                self.descriptor,
                addresses.handoff,
                self.describe_domains,
                self.sessions,
                self.sender,
                self.receiver,
                self.metrics,
            ),
            "baton.v1.TransferAgent",
        )
        self._control.add(
            agent_pb2_grpc.add_TransferPeerServicer_to_server,
            TransferPeerServicer(self.incarnation, self.sender, self.receiver, self.metrics),
            "baton.v1.TransferPeer",
        )
        self._background: list[asyncio.Task[None]] = []
        self._serving = False
        self._observe()

    async def start(self) -> None:
        """Raises SocketInUse, SocketPathInvalid, BindError, AddressError."""
        clear_stale_socket(self._socket_path)
        for actor in self._actors:
            await actor.start()
        await self._control.start()
        self.descriptor.control_address = advertised_address(self._control.addresses[0], self._addresses.advertise_host)
        await self.sessions.server.start()
        self._serving = True
        await self._local.start()
        events = deliver(self._engine, self.receiver.tell, self.sender.tell, self._engine_failed)
        parts = [("ticks", self._tick()), ("events", events), *((actor.name, actor.join()) for actor in self._actors)]
        self._background = [asyncio.create_task(self._mind(name, part), name=name) for name, part in parts]
        logger.info(
            "agent %#018x: workers at %s, model processes at %s, agents at %s, transport %s",
            self.incarnation,
            self._addresses.socket,
            self._addresses.handoff,
            self.descriptor.control_address,
            self.descriptor.transport,
        )

    async def stop(self) -> None:
        """Ends every session, waits for the writes to drain and for other agents to be told, at most
        `shutdown_timeout` seconds; then closes everything. Idempotent."""
        deadline = asyncio.get_running_loop().time() + self.options.shutdown_timeout
        await self.sessions.server.stop()
        await self._local.set_serving("baton.v1.TransferAgent", False)
        if self.sessions.running and not self.failed.done():
            try:
                async with asyncio.timeout_at(deadline):
                    await (await self.sessions.ask(EndAll("SHUTDOWN")))
                    await self.peers.told(self.options.stop_timeout)
            except TimeoutError:
                logger.warning("writes did not drain within %g s", self.options.shutdown_timeout)
        if self._serving:
            # Not otherwise: it would remove the socket of the agent that was here first.
            await self._local.stop(1.0)
        await self._control.stop(0.5)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.sessions.server.close_all()
        for actor in self._actors:
            await actor.stop()
        self._checksums.close()
        await self._engine.close()

    async def failure(self) -> None:
        """Waits until the agent can't go on, and raises why."""
        raise await asyncio.shield(self.failed)

    def problem(self) -> dict[str, object] | None:
        """What is wrong with the agent, for its health page; None if nothing is."""
        if self.failed.done():
            return {"problem": str(self.failed.result())}
        stalled_us = self._engine.metrics().get("busy_us", 0)
        if stalled_us > STALLED * 1e6:
            return {"problem": "the fabric's provider does not return", "busy_s": stalled_us / 1e6}
        return None

    def describe_domains(self) -> list[agent_pb2.FabricDomain]:
        """What the fabric was opened on, by number, and what went over each."""
        return [
            agent_pb2.FabricDomain(
                name=self._domains.names[number],
                provider=str(domain["provider"]),
                device=str(domain["domain"]),
                address=str(domain["address"]),
                serves=self._domains.served_by(number),
                **moved,
            )
            for number, (domain, moved) in enumerate(
                zip(self._engine.capabilities(), self._engine.domain_metrics(), strict=True)
            )
        ]

    @property
    def _actors(self) -> tuple[Actor, ...]:
        return self.peers, self.receiver, self.sender, self.sessions

    # --- wiring ---------------------------------------------------------------------------------------------------

    def _needed(self, incarnation: int) -> bool:
        return self.receiver.needs(incarnation) or self.sender.needs(incarnation)

    def _peer_lost(self, lost: PeerLost) -> None:
        self.receiver.tell(lost)
        self.sender.tell(lost)

    def _engine_failed(self, detail: str) -> None:
        self._fail(EngineDown(f"the native engine failed: {detail}"))

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def _mind(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        """An agent that lost one of its parts knows nothing for sure any more: it ends, and a new one starts clean."""
        try:
            await part
        except ActorStopped:
            # The consequence: the actor's own failure is told by its own watch.
            logger.info("%s: no actor is there to hear of them", name)
        except Exception as error:
            logger.exception("%s failed", name)
            self._fail(error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.receiver.tell(Tick())
            self.sender.tell(Tick())
            await self.peers.close_idle()

    def _observe(self) -> None:
        metrics, receiver = self.metrics, self.receiver
        metrics.sessions.set_function(lambda: self.sessions.count)
        metrics.registered_bytes.set_function(lambda: self.sessions.registered_bytes)
        metrics.peers.set_function(lambda: self.peers.connections)
        metrics.open_transfers.set_function(lambda: self.sender.open_transfers)
        metrics.open_inboxes.set_function(lambda: receiver.open_inboxes)
        metrics.oldest_quarantine_seconds.set_function(receiver.oldest_quarantine)
        for stage in QUARANTINE:
            metrics.quarantined_inboxes.labels(stage.value).set_function(partial(receiver.quarantined, stage))
        metrics.read_fabric(self._engine.metrics)
        metrics.read_domains(self._domains.names, self._engine.domain_metrics)


def _socket_path(address: str) -> str:
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        raise InvalidArgument(
            f"workers are served on a unix socket only, not at {address!r}: write unix:/run/baton/agent.sock",
            field="agent.socket",
        )
    check_socket_path(parsed.path)
    return parsed.path
