"""One attachment of a worker's engine to its node's transfer agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

from baton_rpc.errors import RemoteError
from baton_worker.background import BackgroundTasks, first_of
from baton_worker.errors import AgentUnavailable

log = logging.getLogger(__name__)

# A call that only changes the agent's tables; measured at 0.3 ms. Far above that the agent is stuck or gone.
CALL_TIMEOUT_S = 5.0
# StopTransfer at the peer, then the fence: the agent bounds both by itself, this only catches an agent that hangs.
CLOSE_TIMEOUT_S = 30.0
# Between two attempts to open a broken stream of events again.
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 1.0

_T = TypeVar("_T")
_K = TypeVar("_K")

InboxEvent = agent_pb2.InboxFull | agent_pb2.InboxFailed
TransferEvent = agent_pb2.TransferDone | agent_pb2.TransferFailed


@dataclass(frozen=True)
class Inbox:
    """The receiver's end of a transfer: what the sender must know, and how it ended."""

    descriptor: agent_pb2.InboxDescriptor
    ended: asyncio.Future[InboxEvent]

    @property
    def key(self) -> tuple[int, int]:
        return self.descriptor.slot, self.descriptor.generation


@dataclass(frozen=True)
class Checked:
    """What the agents compare by a checksum before an inbox counts as full: the first `tokens` positions of the
    destination's pages."""

    pages: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Transfer:
    """The sender's end of a transfer."""

    transfer: int
    ended: asyncio.Future[TransferEvent]


class AgentSession:
    """The session's calls and its stream of events.

    `lost` resolves when the session is over, and only then: from that moment no write can touch or read the engine's
    memory through it, so that everything it moved counts as quiesced.
    """

    def __init__(
        self,
        session: int,
        channel: grpc.aio.Channel,
        descriptor: common_pb2.AgentDescriptor,
        agent_gone: asyncio.Future[None],
    ) -> None:
        """`agent_gone` resolves when the model process sees its hand-off connection end."""
        self.session = session
        self.descriptor = descriptor
        self.regions: list[common_pb2.RegionDescriptor] = []
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._agent_gone = agent_gone
        self._stub = agent_pb2_grpc.TransferAgentStub(channel)
        self._submitting = asyncio.Lock()
        self._background = BackgroundTasks()
        self._inboxes: dict[tuple[int, int], asyncio.Future[InboxEvent]] = {}
        self._transfers: dict[int, asyncio.Future[TransferEvent]] = {}
        # An event can overtake the answer of the call that opened its subject. Only while such a call is under way is
        # an event of an unknown subject kept: otherwise its subject is closed or forgotten, and nobody would take it.
        self._opening = 0
        self._early: dict[tuple[int, int] | int, Any] = {}
        self._pump = asyncio.create_task(self._follow(), name=f"agent-events-{session:x}")

    async def ready(self, timeout: float) -> None:
        """Waits until all ranks' memory is registered; raises AgentUnavailable."""
        await first_of(self._ready, self.lost, self._pump, timeout=timeout)
        if self._pump.done() and not self.lost.done():
            self._pump.result()
        if self.lost.done():
            raise AgentUnavailable(f"the agent ended the session: {self.lost.result()}")
        if not self._ready.done():
            raise AgentUnavailable(f"the agent did not register the engine's memory within {timeout} s")

    async def over(self) -> str:
        """Why the session is over, once it is; raises what following its events failed of."""
        await first_of(self.lost, self._pump)
        if not self.lost.done():
            self._pump.result()
        return self.lost.result()

    async def close(self) -> None:
        """Stops following events. The session itself ends with the hand-off connection."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._end("closed")
        await self._background.drain(timeout=1.0)

    # --- receiving side -------------------------------------------------------------------------------------------

    async def open_inbox(
        self,
        sender: common_pb2.AgentDescriptor,
        expected_extents: int,
        checked: Checked | None = None,
        *,
        dp_rank: int = 0,
    ) -> Inbox:
        """`dp_rank`: the data-parallel rank of this session whose memory is written.

        Raises AgentUnavailable, or RemoteError with the agent's refusal. A cancelled call leaves nothing.
        """
        request = agent_pb2.OpenInboxRequest(
            session=self.session, sender=sender, expected_extents=expected_extents, data_parallel_rank=dp_rank
        )
        if checked is not None:
            request.checksum = agent_pb2.CHECKSUM_CRC32C
            request.pages.extend(checked.pages)
            request.tokens = checked.tokens
        return await self._opened(self._open_inbox(request), self.close_inbox)

    async def _open_inbox(self, request: agent_pb2.OpenInboxRequest) -> Inbox:
        response = await self._call(self._stub.OpenInbox, request, CALL_TIMEOUT_S)
        key = response.inbox.slot, response.inbox.generation
        return Inbox(response.inbox, self._expect(self._inboxes, key))

    async def close_inbox(self, inbox: Inbox) -> str:
        """Returns when no write of the transfer can follow, with how that was made sure: full, quiesced or fenced."""
        slot, generation = inbox.key
        request = agent_pb2.CloseInboxRequest(session=self.session, slot=slot, generation=generation)
        with _dropping(self._inboxes, inbox.key):
            response = await self._call(self._stub.CloseInbox, request, CLOSE_TIMEOUT_S)
        return agent_pb2.InboxOutcome.Name(response.outcome).removeprefix("INBOX_OUTCOME_").lower()

    # --- sending side ---------------------------------------------------------------------------------------------

    async def open_transfer(
        self,
        inbox: agent_pb2.InboxDescriptor,
        source_pages: Sequence[int],
        destination_pages: Sequence[int],
        *,
        prefix_tokens: int = 0,
        dp_rank: int = 0,
    ) -> Transfer:
        """Both lists start with the page that holds position `prefix_tokens` of the prompt. `dp_rank`: the
        data-parallel rank of this session that computes it.

        Raises as `open_inbox` does. A cancelled call leaves nothing.
        """
        request = agent_pb2.OpenTransferRequest(
            session=self.session,
            inbox=inbox,
            source_pages=source_pages,
            destination_pages=destination_pages,
            prefix_tokens=prefix_tokens,
            data_parallel_rank=dp_rank,
        )
        return await self._opened(self._open_transfer(request), self.cancel_transfer)

    async def _open_transfer(self, request: agent_pb2.OpenTransferRequest) -> Transfer:
        response = await self._call(self._stub.OpenTransfer, request, CALL_TIMEOUT_S)
        return Transfer(response.transfer, self._expect(self._transfers, response.transfer))

    async def submit_step(self, step: int, chunks: Sequence[agent_pb2.ChunkPlan]) -> None:
        """Calls reach the agent in the order in which they were made: chunks of a transfer follow each other."""
        request = agent_pb2.SubmitStepRequest(session=self.session, step=step, chunks=chunks)
        async with self._submitting:
            await self._call(self._stub.SubmitStep, request, CALL_TIMEOUT_S)

    async def cancel_transfer(self, transfer: Transfer) -> None:
        """Returns when none of the transfer's writes reads this worker's memory any more."""
        request = agent_pb2.CancelTransferRequest(session=self.session, transfer=transfer.transfer)
        with _dropping(self._transfers, transfer.transfer):
            await self._call(self._stub.CancelTransfer, request, CLOSE_TIMEOUT_S)

    def forget(self, transfer: Transfer) -> None:
        """The transfer has ended and its owner knows."""
        self._transfers.pop(transfer.transfer, None)

    # --- internals ------------------------------------------------------------------------------------------------

    def _expect(self, table: dict[Any, asyncio.Future[Any]], key: tuple[int, int] | int) -> asyncio.Future[Any]:
        """The future of what was just opened; raises AgentUnavailable if the session ended before the answer came."""
        if self.lost.done():
            raise AgentUnavailable(f"the agent's session is over: {self.lost.result()}")
        future = table[key] = asyncio.get_running_loop().create_future()
        if key in self._early:
            future.set_result(self._early.pop(key))
        return future

    async def _opened(self, opening: Coroutine[Any, Any, _T], undo: Callable[[_T], Coroutine[Any, Any, object]]) -> _T:
        """Runs `opening`; if the caller is cancelled meanwhile, what it opened is undone."""
        task = self._background.spawn(self._outcome(opening), "open at the agent")
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                # The session was closed; the caller itself goes on.
                raise AgentUnavailable("the agent's session was closed") from None
            self._background.spawn(self._undo(task, undo), "undo at the agent")
            raise
        if isinstance(outcome, AgentUnavailable | RemoteError):
            raise outcome
        return outcome

    async def _outcome(self, opening: Coroutine[Any, Any, _T]) -> _T | AgentUnavailable | RemoteError:
        """A refusal is a value here: its caller may be gone, and then it concerns nobody."""
        self._opening += 1
        try:
            return await opening
        except (AgentUnavailable, RemoteError) as error:
            return error
        finally:
            self._opening -= 1
            if not self._opening:
                self._early.clear()

    async def _undo(
        self,
        task: asyncio.Task[_T | AgentUnavailable | RemoteError],
        undo: Callable[[_T], Coroutine[Any, Any, object]],
    ) -> None:
        await asyncio.wait({task})
        if task.cancelled():
            return
        outcome = task.result()
        if isinstance(outcome, AgentUnavailable | RemoteError):
            log.info("nothing to undo at the agent: %s", outcome)
            return
        while not self.lost.done():
            try:
                await undo(outcome)
                return
            except AgentUnavailable:
                await first_of(self.lost, timeout=1.0)
            except RemoteError as error:
                log.info("nothing to undo at the agent: %s", error)
                return

    async def _call(self, method: Any, request: Any, timeout: float) -> Any:
        """Calls the agent; an agent that is gone or mute becomes AgentUnavailable, its refusals RemoteError."""
        if self.lost.done():
            raise AgentUnavailable(f"the agent's session is over: {self.lost.result()}")
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise AgentUnavailable(f"the transfer agent does not answer: {error.details()}") from None
            raise RemoteError.from_rpc(error) from None

    async def _follow(self) -> None:
        """Delivers events until the session is over. A stream that merely breaks is opened again."""
        delay = FIRST_DELAY_S
        broken = False
        while True:
            try:
                async for event in self._stub.Events(agent_pb2.EventsRequest(session=self.session)):
                    delay = FIRST_DELAY_S
                    broken = False
                    self._deliver(event)
                # The agent ends the stream only after the session's last write is drained or fenced.
                return self._end("the agent ended the session")
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                    return self._end(f"the agent does not know the session: {error.details()}")
                if not broken:
                    log.warning("event stream of the transfer agent broke: %s", error.details())
                broken = True
            await first_of(self._agent_gone, timeout=delay)
            if self._agent_gone.done():
                return self._end("the transfer agent is gone")
            delay = min(delay * 2, LONGEST_DELAY_S)

    def _deliver(self, event: agent_pb2.AgentEvent) -> None:
        match event.WhichOneof("event"):
            case "inbox_full":
                full = event.inbox_full
                self._resolve(self._inboxes, (full.slot, full.generation), full)
            case "inbox_failed":
                failed = event.inbox_failed
                self._resolve(self._inboxes, (failed.slot, failed.generation), failed)
            case "transfer_done":
                self._resolve(self._transfers, event.transfer_done.transfer, event.transfer_done)
            case "transfer_failed":
                self._resolve(self._transfers, event.transfer_failed.transfer, event.transfer_failed)
            case "session_ready":
                self.regions = list(event.session_ready.regions)
                if not self._ready.done():
                    self._ready.set_result(None)

    def _resolve(
        self, table: dict[Any, asyncio.Future[Any]], key: tuple[int, int] | int, event: InboxEvent | TransferEvent
    ) -> None:
        future = table.get(key)
        if future is None:
            if self._opening:
                self._early[key] = event
        elif not future.done():
            future.set_result(event)

    def _end(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        for (slot, generation), inbox in self._inboxes.items():
            if not inbox.done():
                inbox.set_result(
                    agent_pb2.InboxFailed(slot=slot, generation=generation, reason=f"agent lost: {why}", quiesced=True)
                )
        for transfer, ended in self._transfers.items():
            if not ended.done():
                ended.set_result(
                    agent_pb2.TransferFailed(transfer=transfer, reason=f"agent lost: {why}", quiesced=True)
                )


@contextmanager
def _dropping(table: dict[_K, asyncio.Future[_T]], key: _K) -> Iterator[None]:
    """Forgets an inbox or a transfer once the agent has ended it, or says that it knows of none."""
    try:
        yield
    except RemoteError as error:
        if error.status == "NOT_FOUND":
            table.pop(key, None)
        raise
    table.pop(key, None)
