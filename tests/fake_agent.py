"""A transfer agent that moves nothing: keeps the tables of a real one, and lets a test play the fabric.

`before["OpenInbox"] = hook` runs `await hook(request, context)` before the call takes effect, `after[...]` after it and
before the answer: there a test holds a call up, or refuses it with `refuse`.
"""

import asyncio
import collections
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

from baton_rpc import RpcServer, open_channel
from conditions import until


class Refusal(Exception):
    """What a hook raises to have the call refused."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"refused: {reason}")
        self.status = status
        self.reason = reason
        self.fields: dict[str, str] = {}


def refuse(status: str, reason: str = "TEST") -> Callable[[Any, Any], Awaitable[None]]:
    async def hook(request: Any, context: Any) -> None:
        raise Refusal(status, reason)

    return hook


class Gate:
    """A hook that holds calls up until `open()`."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, request: Any, context: Any) -> None:
        self.entered.set()
        await self._open.wait()


class FakeAgent(agent_pb2_grpc.TransferAgentServicer):
    def __init__(self, incarnation: int = 7) -> None:
        self.directory = tempfile.mkdtemp(prefix="baton-t-")
        self.target = f"unix:{os.path.join(self.directory, 'agent.sock')}"
        self.incarnation = incarnation
        self.calls: collections.Counter[str] = collections.Counter()
        self.before: dict[str, Callable[[Any, Any], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[Any, Any], Awaitable[None]]] = {}
        self.sessions: dict[int, asyncio.Queue[Any]] = {}
        self.inboxes: dict[tuple[int, int], agent_pb2.OpenInboxRequest] = {}
        self.closed: list[tuple[int, int]] = []
        self.transfers: dict[int, agent_pb2.OpenTransferRequest] = {}
        self.cancelled: list[int] = []
        self.steps: list[agent_pb2.SubmitStepRequest] = []
        self._next = 0
        self._server: RpcServer | None = None

    @property
    def descriptor(self) -> common_pb2.AgentDescriptor:
        return common_pb2.AgentDescriptor(
            version=1, incarnation=self.incarnation, control_address="127.0.0.1:1", transport="tcp", node="127.0.0.1"
        )

    async def start(self) -> "FakeAgent":
        self._server = RpcServer([self.target])
        self._server.add(agent_pb2_grpc.add_TransferAgentServicer_to_server, self, "baton.v1.TransferAgent")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def restart(self) -> None:
        """As a new process: another incarnation that knows nothing."""
        await self.stop()
        self.incarnation += 1
        self.sessions.clear()
        self.inboxes.clear()
        self.transfers.clear()
        await self.start()

    def channel(self) -> grpc.aio.Channel:
        return open_channel(self.target)

    async def close(self) -> None:
        await self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the fabric's part, played by the test ---------------------------------------------------------------------

    def hand_over(self, session: int, *, ready: bool = True) -> None:
        """The model process has handed its memory over."""
        self.sessions[session] = asyncio.Queue()
        if ready:
            self.emit(session, session_ready=agent_pb2.SessionReady(regions=[common_pb2.RegionDescriptor(length=1)]))

    def emit(self, session: int, **event: Any) -> None:
        self.sessions[session].put_nowait(agent_pb2.AgentEvent(**event))

    def fill(self, key: tuple[int, int], **times: int) -> None:
        request = self.inboxes[key]
        full = agent_pb2.InboxFull(slot=key[0], generation=key[1], extents=request.expected_extents, **times)
        self.emit(request.session, inbox_full=full)

    def fail_inbox(self, key: tuple[int, int], reason: str = "ABORTED", *, quiesced: bool = True) -> None:
        failed = agent_pb2.InboxFailed(slot=key[0], generation=key[1], reason=reason, quiesced=quiesced)
        self.emit(self.inboxes[key].session, inbox_failed=failed)

    def finish(self, transfer: int, **stats: int) -> None:
        done = agent_pb2.TransferDone(transfer=transfer, stats=common_pb2.TransferStats(**stats))
        self.emit(self.transfers.pop(transfer).session, transfer_done=done)

    def fail_transfer(self, transfer: int, reason: str = "PEER_FAILED") -> None:
        failed = agent_pb2.TransferFailed(transfer=transfer, reason=reason, quiesced=True)
        self.emit(self.transfers.pop(transfer).session, transfer_failed=failed)

    def break_streams(self) -> None:
        for queue in self.sessions.values():
            queue.put_nowait(Refusal("UNAVAILABLE", "BROKEN"))

    def end(self, session: int) -> None:
        """Drained, and over."""
        self.sessions.pop(session).put_nowait(None)

    async def opened_inbox(self, count: int = 1) -> tuple[int, int]:
        """The key of the latest of `count` inboxes that were ever opened."""
        await until(lambda: self.calls["OpenInbox"] >= count and self.inboxes, "an inbox")
        return list(self.inboxes)[-1]

    async def opened_transfer(self) -> int:
        await until(lambda: self.transfers, "a transfer")
        return list(self.transfers)[-1]

    # --- the service ------------------------------------------------------------------------------------------------

    async def _enter(self, name: str, request: Any, context: Any) -> None:
        self.calls[name] += 1
        if name in self.before:
            await self.before[name](request, context)
        if name != "Describe" and request.session not in self.sessions:
            raise Refusal("NOT_FOUND", "UNKNOWN_SESSION")

    async def _leave(self, name: str, request: Any, context: Any) -> None:
        if name in self.after:
            await self.after[name](request, context)

    async def Describe(self, request, context):
        await self._enter("Describe", request, context)
        return agent_pb2.DescribeResponse(agent=self.descriptor, handoff_path="/handoff")

    async def Events(self, request, context):
        await self._enter("Events", request, context)
        queue = self.sessions[request.session]
        while (event := await queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def OpenInbox(self, request, context):
        await self._enter("OpenInbox", request, context)
        self._next += 1
        key = self._next, 1
        self.inboxes[key] = request
        await self._leave("OpenInbox", request, context)
        return agent_pb2.OpenInboxResponse(
            inbox=agent_pb2.InboxDescriptor(version=1, receiver=self.descriptor, slot=key[0], generation=key[1])
        )

    async def CloseInbox(self, request, context):
        await self._enter("CloseInbox", request, context)
        key = request.slot, request.generation
        if self.inboxes.pop(key, None) is None:
            raise Refusal("NOT_FOUND", "UNKNOWN_INBOX")
        self.closed.append(key)
        return agent_pb2.CloseInboxResponse(outcome=agent_pb2.INBOX_OUTCOME_QUIESCED)

    async def OpenTransfer(self, request, context):
        await self._enter("OpenTransfer", request, context)
        self._next += 1
        number = self._next
        self.transfers[number] = request
        await self._leave("OpenTransfer", request, context)
        return agent_pb2.OpenTransferResponse(transfer=number)

    async def SubmitStep(self, request, context):
        await self._enter("SubmitStep", request, context)
        self.steps.append(request)
        return agent_pb2.SubmitStepResponse()

    async def CancelTransfer(self, request, context):
        await self._enter("CancelTransfer", request, context)
        self.transfers.pop(request.transfer, None)
        self.cancelled.append(request.transfer)
        return agent_pb2.CancelTransferResponse()
