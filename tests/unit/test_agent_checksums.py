"""Transfers with checksums, between two agents of this process over tcp."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from baton.v1 import agent_pb2

from agent_kit import HEADS, LAYERS, PAGE_SIZE, Model, Worker, extents, worker
from baton_agent.checksums import Checksums
from baton_agent.fabric import FabricEvent
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_fabric.engine import FabricEngine
from baton_fabric.errors import FabricError
from baton_fabric.faults import FaultPlan, FaultRule
from baton_kv.plan import expected_extents
from baton_kv.shards import ShardMap
from baton_kv.transfer.sending import Stage
from baton_rpc import RemoteError
from conditions import until
from fake_fabric import InboxFull

OPTIONS = AgentOptions(stop_timeout=1.0, drain_timeout=0.5)


@dataclass
class Side:
    engine: FabricEngine
    service: TransferAgentService
    models: list[Model]
    worker: Worker

    def compared(self) -> dict[str, float]:
        (family,) = self.service.metrics.checksums.collect()
        return {sample.labels["outcome"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


@asynccontextmanager
async def side(directory: Path, name: str, tp: int = 1, **layout: Any) -> AsyncIterator[Side]:
    engine = await FabricEngine.start("tcp", post_timeout_ms=3000)
    addresses = Addresses(f"unix:{directory}/{name}.sock", f"{directory}/{name}.ho", "127.0.0.1:0")
    service = TransferAgentService(engine, engine.provider, "127.0.0.1", addresses, OPTIONS)
    models = [Model(HEADS // tp, rank, tp) for rank in range(tp)]
    try:
        await service.start()
        async with worker(addresses.socket) as made:
            await made.describe()
            for model in models:
                await model.attach(made.handoff_path, made.session, **layout)
            made.follow()
            await made.event("session_ready")
            yield Side(engine, service, models, made)
    finally:
        await service.stop()
        await engine.close()
        for model in models:
            model.close()


@dataclass
class Pair:
    source: Side
    target: Side

    async def open(
        self, source: Sequence[int], target: Sequence[int], tokens: int | None = None, count: int | None = None
    ) -> tuple[agent_pb2.InboxDescriptor, int]:
        if tokens is None:
            tokens = len(target) * PAGE_SIZE
        if count is None:
            count = extents(len(source), len(self.source.models), len(self.target.models))
        inbox = await self.target.worker.open_inbox(self.source.worker.agent, count, (target, tokens))
        assert inbox.checksum == agent_pb2.CHECKSUM_CRC32C
        return inbox, await self.source.worker.open_transfer(inbox, source, target)

    async def send(self, transfer: int, pages: int) -> None:
        await self.source.worker.submit(0, (transfer, 0, pages, True))
        self.source.models[0].counter.advance(LAYERS)


@asynccontextmanager
async def sides(source: dict[str, Any] | None = None, target: dict[str, Any] | None = None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        # Not pytest's directory: the paths of unix sockets must be short.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bt-")))
        p = await stack.enter_async_context(side(directory, "p", **(source or {})))
        d = await stack.enter_async_context(side(directory, "d", **(target or {})))
        for number, model in enumerate(p.models):
            model.fill(number + 1)
        yield Pair(p, d)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
async def test_what_arrived_as_it_was_sent_is_told_to_be_there(source_tp: int, target_tp: int) -> None:
    async with sides({"tp": source_tp}, {"tp": target_tp}) as pair:
        inbox, transfer = await pair.open([3, 4, 9], [7, 1, 0])
        await pair.send(transfer, 3)
        full = await pair.target.worker.event("inbox_full")
        assert full.slot == inbox.slot
        await pair.source.worker.event("transfer_done")
        assert pair.target.compared() == {"match": 1}
        assert await pair.target.worker.close_inbox(inbox) == agent_pb2.INBOX_OUTCOME_FULL


@pytest.mark.parametrize("order", ["HND", "NHD"])
async def test_the_last_page_counts_only_as_far_as_it_is_written(order: str) -> None:
    """The source's pages are half as large: five of them make two and a half."""
    async with sides({"order": order, "page_size": 2, "pages": 64}, {"order": order}) as pair:
        count = expected_extents(
            ShardMap(HEADS, 1),
            ShardMap(HEADS, 1),
            order,
            prompt_tokens=11,
            prefix_tokens=0,
            page_size=PAGE_SIZE,
            source_page_size=2,
            layers=LAYERS,
        )
        inbox, transfer = await pair.open([5, 6, 1, 2, 40], [7, 1, 3], tokens=10, count=count)
        await pair.send(transfer, 5)
        await pair.target.worker.event("inbox_full", lambda event: event.slot == inbox.slot)
        assert pair.target.compared() == {"match": 1}


def flip(model: Model, page: int, byte: int = 0) -> None:
    start = (LAYERS - 1) * len(model.memory.buffer) // LAYERS + page * len(model.page(0, 0)) + byte
    model.memory.buffer[start] ^= 1


@pytest.mark.parametrize("where", ["source", "target"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_a_byte_that_differs_fails_the_transfer(where: str, tp: int) -> None:
    async with sides({"tp": tp}, {"tp": tp}) as pair:
        held = FaultRule("completion", "hold") if where == "source" else FaultRule("arrival", "hold")
        changed = pair.source if where == "source" else pair.target
        changed.engine.set_faults(FaultPlan((held,)))
        inbox, transfer = await pair.open([3, 4, 9], [7, 1, 0])
        await pair.send(transfer, 3)
        size = len(pair.source.models[0].page(0, 0))
        last = (pair.source.models[-1], 9), (pair.target.models[-1], 0)
        await until(lambda: last[0][0].page(LAYERS - 1, 9) == last[1][0].page(LAYERS - 1, 0), "the last page")
        flip(*last[where == "target"], size - 1)
        # A byte of memory that is no part of the transfer.
        flip(pair.target.models[0], 20)
        changed.engine.release_faults()
        changed.engine.set_faults(FaultPlan())
        failed = await pair.target.worker.event("inbox_failed")
        assert (failed.slot, failed.reason, failed.quiesced) == (inbox.slot, "CHECKSUM_MISMATCH", True)
        assert pair.target.compared() == {"mismatch": 1}
        done = await pair.source.worker.event("transfer_done")
        assert done.transfer == transfer
        # The next attempt may have the same pages at once.
        again, transfer = await pair.open([3, 4, 9], [7, 1, 0])
        await pair.source.worker.submit(1, (transfer, 0, 3, True))
        pair.source.models[0].counter.advance(2 * LAYERS)
        await pair.target.worker.event("inbox_full", lambda event: event.generation == again.generation)
        assert pair.target.compared() == {"mismatch": 1, "match": 1}
        assert pair.target.worker.kinds() == ["session_ready", "inbox_failed", "inbox_full"]


async def test_an_inbox_whose_checksum_never_comes_can_be_closed(monkeypatch) -> None:
    async with sides() as pair:
        monkeypatch.setattr(pair.source.service.peers, "transfer_checksum", lambda *_: None)
        inbox, transfer = await pair.open([1], [2])
        await pair.send(transfer, 1)
        await pair.source.worker.event("transfer_done")
        assert await pair.target.worker.close_inbox(inbox) == agent_pb2.INBOX_OUTCOME_QUIESCED
        assert pair.target.worker.kinds() == ["session_ready"]


async def test_a_transfer_that_is_cancelled_while_its_checksum_is_made_ends_once(monkeypatch) -> None:
    begin = asyncio.Event()
    of_source = Checksums.of_source

    async def slow(self: Checksums, *arguments: Any) -> int:
        await begin.wait()
        return await of_source(self, *arguments)

    monkeypatch.setattr(Checksums, "of_source", slow)
    async with sides() as pair:
        inbox, transfer = await pair.open([1], [2])
        await pair.send(transfer, 1)
        await until(lambda: pair.source.engine.metrics()["transfers_done"] == 1, "the delivery")
        cancelling = asyncio.create_task(pair.source.worker.cancel(transfer))
        closing = asyncio.create_task(pair.target.worker.close_inbox(inbox))
        sending = pair.source.service.sender._transfers[transfer]
        await until(lambda: sending.life.stage is Stage.CANCELLING, "the cancel")
        begin.set()
        await cancelling
        assert await closing in (agent_pb2.INBOX_OUTCOME_FULL, agent_pb2.INBOX_OUTCOME_QUIESCED)
        await until(lambda: pair.source.service.sender.open_transfers == 0, "the end")


async def test_a_checksum_that_can_not_be_made_fails_the_transfer(monkeypatch) -> None:
    async def fail(*_: Any) -> int:
        raise FabricError("no", "INTERNAL", "ENGINE_FAILED")

    monkeypatch.setattr(Checksums, "of_source", fail)
    async with sides() as pair:
        inbox, transfer = await pair.open([1], [2])
        await pair.send(transfer, 1)
        failed = await pair.source.worker.event("transfer_failed")
        assert (failed.transfer, failed.reason, failed.quiesced) == (transfer, "CHECKSUM_FAILED", True)
        heard = await pair.target.worker.event("inbox_failed")
        assert (heard.slot, heard.reason, heard.quiesced) == (inbox.slot, "CHECKSUM_FAILED", True)


async def test_a_receiver_that_can_not_make_one_fails_the_transfer(monkeypatch) -> None:
    async def fail(*_: Any) -> int:
        raise FabricError("no", "INTERNAL", "ENGINE_FAILED")

    monkeypatch.setattr(Checksums, "of_destination", fail)
    async with sides() as pair:
        inbox, transfer = await pair.open([1], [2])
        await pair.send(transfer, 1)
        heard = await pair.target.worker.event("inbox_failed")
        assert (heard.slot, heard.reason, heard.quiesced) == (inbox.slot, "CHECKSUM_FAILED", True)
        assert pair.target.compared() == {"failed": 1}


async def test_what_can_not_be_checked_is_refused() -> None:
    async with sides() as pair:
        sender, receiver = pair.source.worker.agent, pair.target.worker
        for pages, tokens in (([1, 2], 3 * PAGE_SIZE), ([1, 2], PAGE_SIZE), ([10**6], PAGE_SIZE)):
            with pytest.raises(RemoteError) as error:
                await receiver.open_inbox(sender, 1, (pages, tokens))
            assert error.value.status == "INVALID_ARGUMENT"
        request = agent_pb2.OpenInboxRequest(session=receiver.session, sender=sender, expected_extents=1, checksum=9)
        with pytest.raises(RemoteError) as error:
            await receiver.call(receiver.stub.OpenInbox, request)
        assert (error.value.status, error.value.fields["field"]) == ("INVALID_ARGUMENT", "checksum")


async def test_memory_of_a_gpu_is_refused(monkeypatch) -> None:
    def unsupported(self: FabricEngine, region: int, *_: Any) -> int:
        raise FabricError(f"region {region} is memory of a GPU", "FAILED_PRECONDITION", "CHECKSUM_UNSUPPORTED")

    async with sides() as pair:
        inbox = await pair.target.worker.open_inbox(pair.source.worker.agent, extents(1), ([1], PAGE_SIZE))
        monkeypatch.setattr(FabricEngine, "checksum", unsupported)
        for call in (
            pair.source.worker.open_transfer(inbox, [1], [1]),
            pair.target.worker.open_inbox(pair.source.worker.agent, extents(1), ([1], PAGE_SIZE)),
        ):
            with pytest.raises(RemoteError) as error:
                await call
            assert (error.value.status, error.value.reason) == ("FAILED_PRECONDITION", "CHECKSUM_UNSUPPORTED")


async def test_an_event_whose_times_go_backwards_ends_no_agent() -> None:
    """Seen under random faults: an inbox was full 1.6 ms before its first immediate."""
    async with sides() as pair:
        inbox = await pair.target.worker.open_inbox(pair.source.worker.agent, extents(1))
        event = InboxFull(inbox.slot, inbox.generation % 256, extents(1), first_ns=3_000_000, full_ns=1_380_000)
        pair.target.service.receiver.tell(FabricEvent(event))
        full = await pair.target.worker.event("inbox_full")
        assert (full.slot, full.duration_us) == (inbox.slot, 0)
