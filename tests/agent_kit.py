"""Parts for tests of the transfer agent: workers' calls, and models that hand memory over."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

from baton_kv.plan import expected_extents
from baton_kv.shards import ShardMap
from baton_memory import Handoff, HandoffConnection, LayerCounter, SharedMemory, hand_over
from baton_rpc import RemoteError, open_channel
from conditions import DEADLINE_S as DEADLINE

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, ELEMENT = 3, 32, 4, 2, 8, 4
PAGE_BYTES = 2 * HEADS * PAGE_SIZE * DIM * ELEMENT
LAYER_BYTES = PAGES * PAGE_BYTES
LENGTH = LAYERS * LAYER_BYTES


def layout(heads: int = HEADS, **changes: Any) -> dict[str, Any]:
    return {
        "order": "HND",
        "layers": LAYERS,
        "pages": PAGES,
        "page_size": PAGE_SIZE,
        "kv_heads": heads,
        "kv_heads_total": HEADS,
        "head_dim": DIM,
        "element_size": ELEMENT,
        "dtype": "float32",
        **changes,
    }


class Model:
    """What a model process of one rank holds."""

    def __init__(self, heads: int = HEADS, rank: int = 0, ranks: int = 1) -> None:
        self.heads, self.rank, self.ranks = heads, rank, ranks
        self.memory = SharedMemory.create("kv", LENGTH * heads // HEADS)
        self.counter = LayerCounter.create()
        self.connection: HandoffConnection | None = None

    def fill(self, seed: int) -> None:
        pattern = bytes((seed * 31 + index * 7 + (index >> 8)) & 0xFF for index in range(self.memory.length))
        self.memory.buffer[:] = pattern

    def page(self, layer: int, page: int) -> bytes:
        size = PAGE_BYTES * self.heads // HEADS
        start = layer * PAGES * size + page * size
        return bytes(self.memory.buffer[start : start + size])

    def offer(self, session: int, **changes: Any) -> Handoff:
        regions = [self.memory.region("kv")]
        return Handoff(session, self.rank, self.ranks, layout(self.heads, **changes), regions)

    async def attach(self, path: str, session: int, **changes: Any) -> None:
        self.connection = await asyncio.to_thread(
            hand_over,
            path,
            self.offer(session, **changes),
            [self.memory.fd],
            self.counter.memory_fd,
            self.counter.doorbell_fd,
        )

    def leave(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.leave()
        self.counter.close()
        self.memory.close()


class Worker:
    """One session's calls, and its events as they come."""

    def __init__(self, target: str) -> None:
        self.channel = open_channel(target)
        self.stub = agent_pb2_grpc.TransferAgentStub(self.channel)
        self.session = secrets.randbits(64) or 1
        self.events: list[agent_pb2.AgentEvent] = []
        self.changed = asyncio.Condition()
        self.ended: str | None = None
        self.reader: asyncio.Task[None] | None = None
        self.agent = common_pb2.AgentDescriptor()
        self.handoff_path = ""

    async def describe(self) -> None:
        answer = await self.stub.Describe(agent_pb2.DescribeRequest(), timeout=DEADLINE, wait_for_ready=True)
        self.agent, self.handoff_path = answer.agent, answer.handoff_path

    async def attach(self, *models: Model) -> None:
        await self.describe()
        for model in models:
            await model.attach(self.handoff_path, self.session)
        self.follow()
        await self.event("session_ready")

    def follow(self) -> None:
        self.reader = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.gather(self.reader, return_exceptions=True)
        await self.channel.close()

    async def event(self, kind: str, wanted: Callable[[Any], bool] = lambda event: True) -> Any:
        """The first event of this kind for which `wanted` holds."""

        def find() -> Any:
            for event in self.events:
                if event.WhichOneof("event") == kind and wanted(getattr(event, kind)):
                    return getattr(event, kind)
            return None

        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: find() is not None)
        return find()

    async def end(self) -> str:
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events]

    async def open_inbox(
        self,
        sender: common_pb2.AgentDescriptor,
        extents: int,
        checked: tuple[Sequence[int], int] | None = None,
        dp_rank: int = 0,
    ) -> agent_pb2.InboxDescriptor:
        """`checked`: destination pages and tokens, with a checksum."""
        request = agent_pb2.OpenInboxRequest(
            session=self.session, sender=sender, expected_extents=extents, data_parallel_rank=dp_rank
        )
        if checked is not None:
            request.checksum, request.tokens = agent_pb2.CHECKSUM_CRC32C, checked[1]
            request.pages.extend(checked[0])
        return (await self.call(self.stub.OpenInbox, request)).inbox

    async def close_inbox(self, inbox: agent_pb2.InboxDescriptor) -> int:
        request = agent_pb2.CloseInboxRequest(session=self.session, slot=inbox.slot, generation=inbox.generation)
        return (await self.call(self.stub.CloseInbox, request)).outcome

    async def open_transfer(
        self,
        inbox: agent_pb2.InboxDescriptor,
        source: Sequence[int],
        destination: Sequence[int],
        prefix_tokens: int = 0,
        dp_rank: int = 0,
    ) -> int:
        request = agent_pb2.OpenTransferRequest(
            session=self.session,
            inbox=inbox,
            source_pages=source,
            destination_pages=destination,
            prefix_tokens=prefix_tokens,
            data_parallel_rank=dp_rank,
        )
        return (await self.call(self.stub.OpenTransfer, request)).transfer

    async def submit(self, step: int, *chunks: tuple[int, int, int, bool]) -> None:
        plans = [agent_pb2.ChunkPlan(transfer=t, first_page=f, pages=p, last=last) for t, f, p, last in chunks]
        await self.call(
            self.stub.SubmitStep, agent_pb2.SubmitStepRequest(session=self.session, step=step, chunks=plans)
        )

    async def cancel(self, transfer: int) -> None:
        await self.call(
            self.stub.CancelTransfer, agent_pb2.CancelTransferRequest(session=self.session, transfer=transfer)
        )

    @staticmethod
    async def call(method: Any, request: Any) -> Any:
        """Raises RemoteError."""
        try:
            return await method(request, timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            raise RemoteError.from_rpc(error) from None

    async def _follow(self) -> None:
        try:
            async for event in self.stub.Events(agent_pb2.EventsRequest(session=self.session)):
                await self._note(event)
            self.ended = "OK"
        except grpc.aio.AioRpcError as error:
            self.ended = RemoteError.from_rpc(error).reason
        async with self.changed:
            self.changed.notify_all()

    async def _note(self, event: agent_pb2.AgentEvent) -> None:
        async with self.changed:
            self.events.append(event)
            self.changed.notify_all()


@asynccontextmanager
async def worker(target: str, *models: Model) -> AsyncIterator[Worker]:
    made = Worker(target)
    try:
        if models:
            await made.attach(*models)
        yield made
    finally:
        await made.close()


def extents(pages: int, source_tp: int = 1, destination_tp: int = 1) -> int:
    return expected_extents(
        ShardMap(HEADS, source_tp),
        ShardMap(HEADS, destination_tp),
        "HND",
        prompt_tokens=pages * PAGE_SIZE + 1,
        prefix_tokens=0,
        page_size=PAGE_SIZE,
        layers=LAYERS,
    )
