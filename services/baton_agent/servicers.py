"""The two gRPC services: messages in, questions to the actors, messages out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

from baton_kv.transfer.outcome import Proof
from baton_rpc import TypedError
from baton_telemetry.metrics import AgentMetrics

from .errors import WrongIncarnation
from .receiver import Receiver
from .requests import (
    Aborted,
    CancelTransfer,
    CloseInbox,
    OpenInbox,
    OpenTransfer,
    PlanChunk,
    StopTransfer,
    SubmitStep,
    Summed,
)
from .sender import Sender
from .sessions import FindEvents, Sessions
from .wire import check_slot, read_agent, read_checksum, read_inbox

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_OUTCOMES = {
    Proof.FULL: agent_pb2.INBOX_OUTCOME_FULL,
    Proof.QUIESCED: agent_pb2.INBOX_OUTCOME_QUIESCED,
    Proof.FENCED: agent_pb2.INBOX_OUTCOME_FENCED,
}


Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def _counted(method: Method) -> Method:
    """Counts refusals by reason; the server translates them."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:
            if isinstance(error, TypedError):
                self.metrics.refused.labels(error.reason.lower()).inc()
            raise

    return cast(Method, call)


class TransferAgentServicer(agent_pb2_grpc.TransferAgentServicer):
    """For the workers of this node."""

    def __init__(
        self,
        agent: common_pb2.AgentDescriptor,
        handoff_path: str,
        domains: Callable[[], list[agent_pb2.FabricDomain]],
        sessions: Sessions,
        sender: Sender,
        receiver: Receiver,
        metrics: AgentMetrics,
    ) -> None:
        self.metrics = metrics
        self._agent = agent
        self._handoff_path = handoff_path
        self._domains = domains
        self._sessions = sessions
        self._sender = sender
        self._receiver = receiver

    async def Describe(self, request: agent_pb2.DescribeRequest, context: Context) -> agent_pb2.DescribeResponse:
        return agent_pb2.DescribeResponse(agent=self._agent, handoff_path=self._handoff_path, domains=self._domains())

    async def Events(self, request: agent_pb2.EventsRequest, context: Context) -> AsyncIterator[agent_pb2.AgentEvent]:
        log = await self._sessions.ask(FindEvents(request.session))
        async for event in log.read():
            yield event

    @_counted
    async def OpenInbox(self, request: agent_pb2.OpenInboxRequest, context: Context) -> agent_pb2.OpenInboxResponse:
        sender = read_agent(request.sender, self._agent.transport)
        checked = (list(request.pages), request.tokens) if read_checksum(request.checksum) else None
        opening = asyncio.ensure_future(
            self._receiver.ask(
                OpenInbox(request.session, sender, request.expected_extents, checked, request.data_parallel_rank)
            )
        )
        try:
            return agent_pb2.OpenInboxResponse(inbox=await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: self._abandon_inbox(request.session, done))
            raise

    @_counted
    async def CloseInbox(self, request: agent_pb2.CloseInboxRequest, context: Context) -> agent_pb2.CloseInboxResponse:
        closed = await self._receiver.ask(CloseInbox(request.session, request.slot, request.generation))
        return agent_pb2.CloseInboxResponse(outcome=_OUTCOMES[await closed])

    @_counted
    async def OpenTransfer(
        self, request: agent_pb2.OpenTransferRequest, context: Context
    ) -> agent_pb2.OpenTransferResponse:
        inbox = read_inbox(request.inbox, self._agent)
        opened = await self._sender.ask(
            OpenTransfer(
                request.session,
                inbox,
                list(request.source_pages),
                list(request.destination_pages),
                request.prefix_tokens,
                request.data_parallel_rank,
            )
        )
        try:
            return agent_pb2.OpenTransferResponse(transfer=await asyncio.shield(opened))
        except asyncio.CancelledError:
            opened.add_done_callback(lambda done: self._abandon_transfer(request.session, done))
            raise

    @_counted
    async def SubmitStep(self, request: agent_pb2.SubmitStepRequest, context: Context) -> agent_pb2.SubmitStepResponse:
        chunks = [PlanChunk(chunk.transfer, chunk.first_page, chunk.pages, chunk.last) for chunk in request.chunks]
        await self._sender.ask(SubmitStep(request.session, request.step, chunks))
        return agent_pb2.SubmitStepResponse()

    @_counted
    async def CancelTransfer(
        self, request: agent_pb2.CancelTransferRequest, context: Context
    ) -> agent_pb2.CancelTransferResponse:
        await (await self._sender.ask(CancelTransfer(request.session, request.transfer)))
        return agent_pb2.CancelTransferResponse()

    # A caller that gave up will never learn the id of what it opened: nobody else can close it.

    def _abandon_inbox(self, session: int, opening: asyncio.Future[agent_pb2.InboxDescriptor]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            inbox = opening.result()
            self._receiver.tell(CloseInbox(session, inbox.slot, inbox.generation))

    def _abandon_transfer(self, session: int, opened: asyncio.Future[int]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            self._sender.tell(CancelTransfer(session, opened.result()))


class TransferPeerServicer(agent_pb2_grpc.TransferPeerServicer):
    """For other agents. Whatever is meant for a former process on this address is refused."""

    def __init__(self, incarnation: int, sender: Sender, receiver: Receiver, metrics: AgentMetrics) -> None:
        self.metrics = metrics
        self._incarnation = incarnation
        self._sender = sender
        self._receiver = receiver

    @_counted
    async def StopTransfer(
        self, request: agent_pb2.StopTransferRequest, context: Context
    ) -> agent_pb2.StopTransferResponse:
        self._check(request.callee_incarnation)
        check_slot(request.slot)  # each that was stopped is remembered
        stop = StopTransfer(request.caller_incarnation, request.slot, request.generation)
        return agent_pb2.StopTransferResponse(quiesced=await (await self._sender.ask(stop)))

    @_counted
    async def TransferAborted(
        self, request: agent_pb2.TransferAbortedRequest, context: Context
    ) -> agent_pb2.TransferAbortedResponse:
        self._check(request.callee_incarnation)
        await self._receiver.ask(
            Aborted(request.caller_incarnation, request.slot, request.generation, request.reason, request.quiesced)
        )
        return agent_pb2.TransferAbortedResponse()

    @_counted
    async def TransferChecksum(
        self, request: agent_pb2.TransferChecksumRequest, context: Context
    ) -> agent_pb2.TransferChecksumResponse:
        self._check(request.callee_incarnation)
        await self._receiver.ask(Summed(request.caller_incarnation, request.slot, request.generation, request.checksum))
        return agent_pb2.TransferChecksumResponse()

    @_counted
    async def Heartbeat(self, request: agent_pb2.HeartbeatRequest, context: Context) -> agent_pb2.HeartbeatResponse:
        self._check(request.callee_incarnation)
        return agent_pb2.HeartbeatResponse()

    def _check(self, meant: int) -> None:
        if meant != self._incarnation:
            raise WrongIncarnation(meant, self._incarnation)
