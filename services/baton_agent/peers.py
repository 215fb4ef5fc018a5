"""Other agents: calls to them, and whether they are still there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc

from baton_actors import handles
from baton_rpc import RemoteError, open_channel

from .errors import PeerUnreachable, StaleDescriptor
from .liveness import Answer, Liveness, Verdict
from .messages import PeerLost
from .options import AgentOptions
from .wire import Peer
from .working import WorkingActor

logger = logging.getLogger(__name__)

# Incarnations known to be gone; the oldest is forgotten first, and then found out again by its address's new owner.
MAX_DEAD = 1024
ABORT_RETRY = 0.5
# The name of the tasks that do.
TELLING = "telling"
# Twice as long as a channel refuses, after an attempt that failed, without making another.
CONFIRM_TIMEOUT = 1.0


@dataclass(frozen=True)
class Watch:
    """Heartbeats to this peer for as long as somebody needs it. `at_once`: do not wait for the next one."""

    peer: Peer
    at_once: bool = False


@dataclass
class _Watched:
    peer: Peer
    liveness: Liveness
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    alive_at: float = float("-inf")

    @property
    def is_new(self) -> bool:
        """Was not asked yet."""
        return self.alive_at == float("-inf") and self.liveness.misses == 0


class Peers(WorkingActor):
    """Owns the channels and the heartbeats."""

    def __init__(
        self,
        incarnation: int,
        options: AgentOptions,
        credentials: grpc.ChannelCredentials | None,
        needed: Callable[[int], bool],
        on_lost: Callable[[PeerLost], None],
        on_miss: Callable[[], None],
    ) -> None:
        """`needed(incarnation)`: whether a transfer with that agent is open. `on_lost`: once for each loss."""
        super().__init__("peers")
        self._incarnation = incarnation
        self._options = options
        self._credentials = credentials
        self._needed = needed
        self._on_lost = on_lost
        self._on_miss = on_miss
        self._channels: dict[str, tuple[grpc.aio.Channel, float]] = {}
        self._watched: dict[int, _Watched] = {}
        self._dead: OrderedDict[int, None] = OrderedDict()

    @property
    def connections(self) -> int:
        return len(self._channels)

    def is_dead(self, incarnation: int) -> bool:
        """Whether another incarnation was found in this one's place."""
        return incarnation in self._dead

    @handles
    async def watch(self, message: Watch) -> None:
        watched = self._watched.get(message.peer.incarnation)
        if watched is None:
            options = self._options
            liveness = Liveness(options.heartbeat_interval, options.heartbeat_misses, options.heartbeat_retry)
            watched = self._watched[message.peer.incarnation] = _Watched(message.peer, liveness)
            self.spawn(self._beat(watched), "heartbeats")
        elif message.at_once:
            watched.hurry.set()
        # An address is never an identity, but two identities at one address mean that one of them is gone.
        for other in self._watched.values():
            if other.peer.address == message.peer.address and other is not watched:
                other.hurry.set()

    async def on_stop(self, error: BaseException | None) -> None:
        await super().on_stop(error)
        await asyncio.gather(*(channel.close() for channel, _ in self._channels.values()), return_exceptions=True)
        self._channels.clear()

    # --- calls ----------------------------------------------------------------------------------------------------

    async def confirm(self, peer: Peer) -> None:
        """Makes sure that this incarnation answers at its address. Raises StaleDescriptor, PeerUnreachable."""
        if self.is_dead(peer.incarnation):
            raise StaleDescriptor(peer.incarnation, peer.address)
        watched = self._watched.get(peer.incarnation)
        fresh = time.monotonic() - 2 * self._options.heartbeat_interval
        if watched is not None and watched.liveness.misses == 0 and watched.alive_at > fresh:
            return
        answer = await self._heartbeat(peer, self._options.heartbeat_timeout, patient=True)
        if answer is Answer.RESTARTED:
            raise StaleDescriptor(peer.incarnation, peer.address)
        if answer is not Answer.ALIVE:
            raise PeerUnreachable(peer.incarnation, peer.address, answer.name.lower())
        if watched is not None:
            watched.alive_at = time.monotonic()

    async def stop_transfer(self, peer: Peer, slot: int, generation: int) -> bool:
        """Asks the sending agent to stop: whether it confirmed, within `stop_timeout`, that no write can follow."""
        request = agent_pb2.StopTransferRequest(
            caller_incarnation=self._incarnation,
            callee_incarnation=peer.incarnation,
            slot=slot,
            generation=generation,
        )
        if self.is_dead(peer.incarnation):
            return False
        try:
            response = await self._stub(peer).StopTransfer(request, timeout=self._options.stop_timeout)
        except grpc.aio.AioRpcError as error:
            failure = RemoteError.from_rpc(error)
            self._bury_if_wrong(peer, failure)
            logger.warning("agent %#018x does not confirm a stop: %s", peer.incarnation, failure)
            return False
        return bool(response.quiesced)

    def transfer_aborted(self, peer: Peer, slot: int, generation: int, reason: str, quiesced: bool) -> None:
        """Tells the receiver, in the background, until it has heard, is gone, or `abort_timeout` has passed."""
        request = agent_pb2.TransferAbortedRequest(
            caller_incarnation=self._incarnation,
            callee_incarnation=peer.incarnation,
            slot=slot,
            generation=generation,
            reason=reason,
            quiesced=quiesced,
        )
        self.spawn(self._tell(peer, lambda stub: stub.TransferAborted, request), TELLING)

    def transfer_checksum(self, peer: Peer, slot: int, generation: int, checksum: int) -> None:
        """Tells the receiver, in the background, as `transfer_aborted` does."""
        request = agent_pb2.TransferChecksumRequest(
            caller_incarnation=self._incarnation,
            callee_incarnation=peer.incarnation,
            slot=slot,
            generation=generation,
            checksum=checksum,
        )
        self.spawn(self._tell(peer, lambda stub: stub.TransferChecksum, request), TELLING)

    async def told(self, timeout: float) -> None:
        """Until nothing that others must hear is under way any more, or `timeout` seconds have passed."""
        telling = [task for task in self._work if task.get_name() == TELLING]
        if telling:
            await asyncio.wait(telling, timeout=timeout)

    async def close_idle(self) -> None:
        """Closes channels that nothing has used for `idle_timeout`."""
        before = time.monotonic() - self._options.idle_timeout
        for address in list(self._channels):
            # Looked at now: while another one was being closed, this one may have been used again.
            channel, used = self._channels[address]
            if used < before and all(watched.peer.address != address for watched in self._watched.values()):
                del self._channels[address]
                await channel.close()

    # --- internals ------------------------------------------------------------------------------------------------

    async def _tell(
        self, peer: Peer, method: Callable[[agent_pb2_grpc.TransferPeerAsyncStub], Any], request: Any
    ) -> None:
        end = time.monotonic() + self._options.abort_timeout
        while not self.is_dead(peer.incarnation):
            try:
                await method(self._stub(peer))(request, timeout=self._options.heartbeat_timeout)
                return
            except grpc.aio.AioRpcError as error:
                failure = RemoteError.from_rpc(error)
                if self._bury_if_wrong(peer, failure):
                    return
                if failure.status not in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or time.monotonic() > end:
                    logger.warning("agent %#018x was not told of a transfer: %s", peer.incarnation, failure)
                    return
            await asyncio.sleep(ABORT_RETRY)

    async def _beat(self, watched: _Watched) -> None:
        """Heartbeats until nobody needs the peer any more, or it is lost."""
        peer = watched.peer
        try:
            while True:
                watched.hurry.clear()
                answer = await self._heartbeat(peer, self._options.heartbeat_timeout, patient=watched.is_new)
                beat = watched.liveness.judge(answer)
                if answer is Answer.ALIVE:
                    watched.alive_at = time.monotonic()
                else:
                    self._on_miss()
                if beat.verdict is not Verdict.PRESENT:
                    break
                try:
                    async with asyncio.timeout(beat.wait):
                        await watched.hurry.wait()
                except TimeoutError:
                    pass
                if not self._needed(peer.incarnation):
                    return
        finally:
            self._watched.pop(peer.incarnation, None)
        reason = "PEER_RESTARTED" if beat.verdict is Verdict.RESTARTED else "PEER_LOST"
        logger.warning("agent %#018x at %s: %s", peer.incarnation, peer.address, reason)
        self._on_lost(PeerLost(peer, reason))

    async def _heartbeat(self, peer: Peer, timeout: float, patient: bool = False) -> Answer:
        """`patient`: a channel that has just found nobody, and refuses for a while, is no answer: the next incarnation
        may have come to the address meanwhile."""
        request = agent_pb2.HeartbeatRequest(caller_incarnation=self._incarnation, callee_incarnation=peer.incarnation)
        try:
            await self._stub(peer).Heartbeat(
                request, timeout=max(CONFIRM_TIMEOUT, timeout) if patient else timeout, wait_for_ready=patient
            )
        except grpc.aio.AioRpcError as error:
            failure = RemoteError.from_rpc(error)
            if self._bury_if_wrong(peer, failure):
                return Answer.RESTARTED
            return Answer.REFUSED if failure.status == "UNAVAILABLE" else Answer.SILENT
        return Answer.ALIVE

    def _bury_if_wrong(self, peer: Peer, failure: RemoteError) -> bool:
        if failure.reason != "WRONG_INCARNATION":
            return False
        self._dead[peer.incarnation] = None
        if len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        watched = self._watched.get(peer.incarnation)
        if watched is not None:
            watched.hurry.set()
        return True

    def _stub(self, peer: Peer) -> agent_pb2_grpc.TransferPeerAsyncStub:
        entry = self._channels.get(peer.address)
        channel = entry[0] if entry is not None else open_channel(peer.address, self._credentials)
        self._channels[peer.address] = channel, time.monotonic()
        return agent_pb2_grpc.TransferPeerStub(channel)
