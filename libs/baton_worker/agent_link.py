"""Keeps a worker's engines attached to their node's transfer agent, across restarts of the agent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc

from baton_engine.client import EngineClient
from baton_engine.errors import EngineDied, EngineError
from baton_worker.agent_session import CALL_TIMEOUT_S, AgentSession
from baton_worker.errors import AgentUnavailable, EngineUnavailable

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 1.0
# A session that lasts this long shows that the agent is well.
STABLE_S = 5.0


class AgentLink:
    """Owns the present session. A new one begins whenever the former is lost; in between there is none."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        channel: grpc.aio.Channel,
        on_change: Callable[[], None],
    ) -> None:
        """`clients`: the engines, which attach under one session; `on_change` hears of every new one and of every
        loss."""
        self._clients = clients
        self._channel = channel
        self._on_change = on_change
        self._session: AgentSession | None = None
        self._changed = asyncio.Event()
        self._stopped = False
        self._gone: dict[int, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def agent_gone(self, session: int) -> None:
        """The model process saw the hand-off connection of this session end."""
        gone = self._gone.get(session)
        if gone is not None and not gone.done():
            gone.set_result(None)

    @property
    def current(self) -> AgentSession | None:
        return self._session

    async def session(self, timeout: float) -> AgentSession:
        """The present session, or the next one if it comes within `timeout` seconds.

        Raises AgentUnavailable, and EngineUnavailable once stopped.
        """
        try:
            async with asyncio.timeout(timeout):
                while self._stopped or self._session is None or self._session.lost.done():
                    if self._stopped:
                        raise EngineUnavailable("the model process is gone")
                    self._changed.clear()
                    await self._changed.wait()
                return self._session
        except TimeoutError:
            raise AgentUnavailable(f"no transfer agent on this node for {timeout:.1f} s") from None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="agent-link")

    async def join(self) -> None:
        """Until the link is stopped; raises what it failed of, an engine's death included."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        self._stopped = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _keep(self) -> None:
        delay = FIRST_DELAY_S
        complained = False
        while True:
            try:
                session = await self._attach()
            except EngineDied:
                # What all else ends of: it may be known here before its host has cleared up behind it.
                raise
            except (AgentUnavailable, EngineError, grpc.aio.AioRpcError) as error:
                if not complained:
                    log.warning("cannot attach to the transfer agent, trying on: %s", _text(error))
                complained = True
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY_S)
                continue
            complained = False
            log.info("attached to transfer agent %x, session %x", session.descriptor.incarnation, session.session)
            began = time.monotonic()
            self._session = session
            self._changed.set()
            self._on_change()
            why = await session.over()
            log.warning("session %x with the transfer agent is over: %s", session.session, why)
            self._session = None
            self._gone.pop(session.session, None)
            self._on_change()
            await session.close()
            if time.monotonic() - began >= STABLE_S:
                delay = FIRST_DELAY_S
            else:
                # An agent that takes sessions only to end them must not be asked in a tight loop.
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY_S)

    async def _attach(self) -> AgentSession:
        stub = agent_pb2_grpc.TransferAgentStub(self._channel)
        agent = await stub.Describe(agent_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True)
        number = secrets.randbits(64)
        gone = self._gone[number] = asyncio.get_running_loop().create_future()
        session: AgentSession | None = None
        try:
            attaching = [asyncio.create_task(client.attach(agent.handoff_path, number)) for client in self._clients]
            try:
                await asyncio.gather(*attaching)
            finally:
                # No engine may be asked again while it still answers.
                await asyncio.gather(*attaching, return_exceptions=True)
            session = AgentSession(number, self._channel, agent.agent, gone)
            await session.ready(READY_TIMEOUT_S)
            return session
        except BaseException:
            self._gone.pop(number, None)
            if session is not None:
                await session.close()
            raise


def _text(error: Exception) -> str:
    # The text of an AioRpcError is a page long.
    return error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
