"""Two agents in processes of their own, over real transports, with real bytes."""

import asyncio
import contextlib
import random
import signal
import socket
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from baton.v1 import agent_pb2

from agent_kit import LAYERS, PAGES, Model, Worker, extents, worker
from agent_processes import Agent, ModelProcess, agents
from baton_memory.frames import encode_frame
from baton_rpc import RemoteError
from conditions import until
from fabric_harness import SLOWNESS, fabrics

FULL, QUIESCED, FENCED = (
    agent_pb2.INBOX_OUTCOME_FULL,
    agent_pb2.INBOX_OUTCOME_QUIESCED,
    agent_pb2.INBOX_OUTCOME_FENCED,
)
FABRICS = fabrics("tcp", "shm", "auto")


@pytest.fixture
def directory():
    # Not tmp_path: the paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bt-") as path:
        yield Path(path)


@pytest.fixture(params=FABRICS)
def transport(request):
    return request.param


@dataclass
class Setting:
    prefill: Agent
    decode: Agent
    source: Model
    target: Model
    sender: Worker
    receiver: Worker
    step: int = 0

    async def open(self, source: list[int], target: list[int]) -> tuple[agent_pb2.InboxDescriptor, int]:
        inbox = await self.receiver.open_inbox(self.sender.agent, extents(len(source)))
        return inbox, await self.sender.open_transfer(inbox, source, target)

    async def run_step(self, *chunks: tuple[int, int, int, bool], plan: str = "before") -> None:
        """A forward step whose plan comes before, during or after it."""
        step, self.step = self.step, self.step + 1
        for layer in range(LAYERS):
            if (plan, layer) in (("before", 0), ("during", 1)):
                await self.sender.submit(step, *chunks)
            self.source.counter.advance(step * LAYERS + layer + 1)
        if plan == "after":
            await self.sender.submit(step, *chunks)

    async def full(self, inbox: agent_pb2.InboxDescriptor) -> agent_pb2.InboxFull:
        key = inbox.slot, inbox.generation
        return await self.receiver.event("inbox_full", lambda event: (event.slot, event.generation) == key)

    async def ended(self, inbox: agent_pb2.InboxDescriptor) -> str:
        """inbox_full or inbox_failed."""

        def kinds() -> list[str]:
            found = [
                (kind, getattr(event, kind))
                for event in self.receiver.events
                for kind in ("inbox_full", "inbox_failed")
                if event.HasField(kind)
            ]
            ours = (inbox.slot, inbox.generation)
            return [kind for kind, event in found if (event.slot, event.generation) == ours]

        await until(lambda: bool(kinds()), "the end of the inbox")
        return kinds()[0]

    def same(self, source: list[int], target: list[int]) -> bool:
        pairs = list(zip(source, target, strict=True))
        return all(
            self.source.page(layer, a) == self.target.page(layer, b) for layer in range(LAYERS) for a, b in pairs
        )


@asynccontextmanager
async def setting(directory: Path, transport: str):
    with agents(directory, transport, "p", "d") as (prefill, decode):
        source, target = Model(), Model()
        source.fill(3)
        try:
            async with worker(prefill.target, source) as sender, worker(decode.target, target) as receiver:
                yield Setting(prefill, decode, source, target, sender, receiver)
        finally:
            source.close()
            target.close()


async def test_a_plan_may_come_before_during_or_after_its_step(directory, transport):
    async with setting(directory, transport) as pair:
        for turn, plan in enumerate(("before", "during", "after")):
            pair.source.fill(turn)
            pair.target.memory.buffer[:] = bytes(pair.target.memory.length)
            ours, theirs = [3, 4, 5, 9, 7], [20, 21, 22, 1, 0]
            inbox, transfer = await pair.open(ours, theirs)
            await pair.run_step((transfer, 0, 2, False), plan=plan)
            await pair.run_step((transfer, 2, 3, True), plan=plan)
            assert (await pair.full(inbox)).extents == extents(5)
            done = await pair.sender.event("transfer_done", lambda event, number=transfer: event.transfer == number)
            assert done.stats.extents == extents(5)
            assert done.stats.bytes == extents(5) * len(pair.source.page(0, 0))
            assert pair.same(ours, theirs)
            untouched = set(range(PAGES)) - set(theirs)
            assert not any(any(pair.target.page(layer, page)) for layer in range(LAYERS) for page in untouched)
            assert await pair.receiver.close_inbox(inbox) == FULL
        for agent in (pair.prefill, pair.decode):
            assert "torch" not in agent.modules()
            assert agent.stop() == 0


async def test_many_transfers_two_at_a_time_leave_nothing_behind(directory, transport):
    async with setting(directory, transport) as pair:
        levels = None
        for turn in range(40):
            ours = [random.Random(turn).sample(range(PAGES), 4) for _ in range(2)]
            theirs = [[0, 1, 2, 3], [10, 12, 14, 16]]
            pair.target.memory.buffer[:] = bytes(pair.target.memory.length)
            opened = [await pair.open(a, b) for a, b in zip(ours, theirs, strict=True)]
            await pair.run_step(*((transfer, 0, 4, True) for _, transfer in opened))
            for (inbox, transfer), a, b in zip(opened, ours, theirs, strict=True):
                await pair.full(inbox)
                await pair.sender.event("transfer_done", lambda event, number=transfer: event.transfer == number)
                assert pair.same(a, b)
            if turn == 10:
                levels = pair.prefill.descriptors(), pair.decode.descriptors()
        assert levels == (pair.prefill.descriptors(), pair.decode.descriptors())
        # A local receiver copies from the sender's memory.
        assert (pair.prefill.mappings(), pair.decode.mappings()) == (1, 2 if transport in ("local", "auto") else 1)
        pair.source.leave()
        assert await pair.sender.end() == "OK"
        assert pair.prefill.mappings() == 0
        await until(lambda: pair.decode.mappings() == 1, "the receiver has let go of the sender's memory")


async def test_cancel_at_random_moments_ends_exactly_once_each_way(directory, transport):
    async with setting(directory, transport) as pair:
        rng = random.Random(7)
        for turn in range(25):
            inbox, transfer = await pair.open(list(range(16)), list(range(16)))

            async def steps(transfer: int = transfer) -> None:
                for chunk in range(4):
                    await pair.run_step((transfer, chunk * 4, 4, chunk == 3))

            stepping = asyncio.create_task(steps())
            await asyncio.sleep(rng.random() * 0.02)
            if turn % 2:
                await pair.sender.cancel(transfer)
                ended = await pair.receiver.call(
                    pair.receiver.stub.CloseInbox,
                    agent_pb2.CloseInboxRequest(
                        session=pair.receiver.session, slot=inbox.slot, generation=inbox.generation
                    ),
                )
                outcome = ended.outcome
            else:
                outcome = await pair.receiver.close_inbox(inbox)
            assert outcome in (FULL, QUIESCED)
            # Nothing may land in the pages any more: they belong to someone else now.
            pair.target.memory.buffer[:] = b"\x55" * pair.target.memory.length
            await stepping
            await pair.sender.cancel(transfer)
            inbox, transfer = await pair.open([31], [31])
            await pair.run_step((transfer, 0, 1, True))
            await pair.full(inbox)
            size = len(pair.target.page(0, 0))
            for layer in range(LAYERS):
                assert all(pair.target.page(layer, page) == b"\x55" * size for page in range(31))
            keys = [
                (event.inbox_full.slot, event.inbox_full.generation)
                for event in pair.receiver.events
                if event.WhichOneof("event") == "inbox_full"
            ]
            assert len(keys) == len(set(keys))


async def test_the_senders_model_process_is_killed(directory, transport):
    with agents(directory, transport, "p", "d") as (prefill, decode):
        target = Model()
        async with worker(prefill.target) as sender, worker(decode.target, target) as receiver:
            await sender.describe()
            model = await asyncio.to_thread(ModelProcess, sender.handoff_path, sender.session, 3)
            sender.follow()
            inbox = await receiver.open_inbox(sender.agent, extents(4))
            transfer = await sender.open_transfer(inbox, range(4), range(4))
            await sender.submit(0, (transfer, 0, 4, True))
            model.advance(1)
            await until(lambda: any(target.page(0, 3)), "the first layer's pages")
            model.kill()
            failed = await receiver.event("inbox_failed")
            assert (failed.slot, failed.reason, failed.quiesced) == (inbox.slot, "SESSION_ENDED", True)
            assert await sender.end() == "OK"
            assert prefill.mappings() == 0
            # The agent lives, and serves the next model process.
            async with worker(prefill.target) as again:
                await again.describe()
                assert again.agent.incarnation == sender.agent.incarnation
                model = await asyncio.to_thread(ModelProcess, again.handoff_path, again.session, 4)
                inbox = await receiver.open_inbox(again.agent, extents(4))
                transfer = await again.open_transfer(inbox, range(4), range(4))
                model.advance(LAYERS)
                await again.submit(0, (transfer, 0, 4, True))
                await receiver.event("inbox_full", lambda event: event.generation == inbox.generation)
                model.kill()
        target.close()


async def test_the_sending_agent_is_killed_and_comes_back(directory, transport):
    async with setting(directory, transport) as pair:
        inbox, transfer = await pair.open([0, 1], [0, 1])
        await pair.sender.submit(0, (transfer, 0, 2, True))
        pair.source.counter.advance(1)
        began = time.monotonic()
        pair.prefill.kill()
        failed = await pair.receiver.event("inbox_failed")
        assert (failed.slot, failed.quiesced) == (inbox.slot, True)
        assert time.monotonic() - began < 3 * SLOWNESS
        assert await pair.receiver.close_inbox(inbox) == FENCED
        pair.source.leave()
        pair.prefill.start()
        async with worker(pair.prefill.target, pair.source) as sender:
            assert sender.agent.incarnation != pair.sender.agent.incarnation
            assert sender.agent.control_address == pair.sender.agent.control_address
            inbox = await pair.receiver.open_inbox(sender.agent, extents(2))
            transfer = await sender.open_transfer(inbox, [0, 1], [0, 1])
            await sender.submit(0, (transfer, 0, 2, True))
            pair.source.counter.advance(LAYERS)
            await pair.full(inbox)
            assert pair.same([0, 1], [0, 1])


async def test_the_receiving_agent_is_killed_and_comes_back(directory, transport):
    async with setting(directory, transport) as pair:
        inbox, transfer = await pair.open([0, 1], [0, 1])
        pair.decode.kill()
        await pair.sender.submit(0, (transfer, 0, 2, True))
        pair.source.counter.advance(LAYERS)
        failed = await pair.sender.event("transfer_failed")
        assert failed.transfer == transfer
        pair.target.leave()
        pair.decode.start()
        async with worker(pair.decode.target, pair.target) as receiver:
            inbox.generation += 1
            with pytest.raises(RemoteError) as error:
                await pair.sender.open_transfer(inbox, [0], [0])
            assert (error.value.status, error.value.reason) == ("FAILED_PRECONDITION", "STALE_DESCRIPTOR")
            fresh = await receiver.open_inbox(pair.sender.agent, extents(2))
            transfer = await pair.sender.open_transfer(fresh, [0, 1], [0, 1])
            await pair.sender.submit(0, (transfer, 0, 2, True))
            await receiver.event("inbox_full")
            assert pair.same([0, 1], [0, 1])


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_stopped_agent_holds_nobody_up(directory, transport, side):
    async with setting(directory, transport) as pair:
        inbox, transfer = await pair.open([0, 1], [0, 1])
        await pair.sender.submit(0, (transfer, 0, 2, True))
        pair.source.counter.advance(1)
        # Not before: shm of libfabric 1.17 crashes a target that resumes with a connection request of a sender that has
        # closed meanwhile.
        await until(lambda: any(pair.target.page(0, 1)), "the first layer's pages")
        began = time.monotonic()
        if side == "prefill":
            pair.prefill.freeze()
            pair.source.counter.advance(LAYERS)
            assert await pair.receiver.close_inbox(inbox) == FENCED
            # The pages are somebody else's now; the sender will go on where it stood.
            pair.target.memory.buffer[:] = b"\x55" * pair.target.memory.length
        else:
            pair.decode.freeze()
            pair.source.counter.advance(LAYERS)
            # An RDMA device goes on without its process.
            await pair.sender.event("transfer_done" if transport == "verbs" else "transfer_failed")
        assert time.monotonic() - began < 5 * SLOWNESS
        getattr(pair, side).signal(signal.SIGCONT)
        if side == "decode":
            # Full by what was on its way, or fenced: and a fence ends whatever of this sender is open by then, so that
            # the next transfer must not come before.
            ends = {"inbox_full", "inbox_failed"}
            await until(lambda: ends.intersection(pair.receiver.kinds()), "the end of the first inbox")
        # Both go on to serve. The last heartbeat that was missed may be judged only now, and ends what is open by then.
        for attempt in ("inbox_failed", "inbox_full"):
            inbox, transfer = await pair.open([5], [6])
            await pair.sender.submit(0, (transfer, 0, 1, True))
            ended = await pair.ended(inbox)
            if ended == "inbox_full":
                break
            assert ended == attempt
        assert pair.same([5], [6])
        if side == "prefill":
            size = len(pair.target.page(0, 0))
            assert all(pair.target.page(layer, page) == b"\x55" * size for layer in range(LAYERS) for page in (0, 1))


async def test_one_agent_serves_both_workers_of_a_node(directory):
    source, target = Model(), Model()
    source.fill(5)
    with agents(directory, FABRICS[0], "a") as (agent,):
        async with worker(agent.target, source) as sender, worker(agent.target, target) as receiver:
            inbox = await receiver.open_inbox(sender.agent, extents(2))
            transfer = await sender.open_transfer(inbox, [4, 9], [1, 0])
            source.counter.advance(LAYERS)
            await sender.submit(0, (transfer, 0, 2, True))
            await receiver.event("inbox_full")
            await sender.event("transfer_done")
            assert source.page(2, 4) == target.page(2, 1)
            assert source.page(0, 9) == target.page(0, 0)
    source.close()
    target.close()


async def test_malformed_hand_offs_leave_the_agent_as_it_was(directory):
    def talk(path: str, data: bytes, fds: list[int]) -> bytes:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(path)
            socket.send_fds(peer, [data], fds)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := peer.recv(4096):
                    answer += more
            return answer

    async with setting(directory, FABRICS[0]) as pair:
        model = Model()
        good = [model.memory.fd, model.counter.memory_fd, model.counter.doorbell_fd]
        body = model.offer(77).to_json()
        doubled = {**body, "layout": {**body["layout"], "kv_heads": 1}}
        before = pair.prefill.descriptors()
        for data, fds in [
            (b"nonsense", []),
            (encode_frame(body, 3)[:8] + b"\xff\xff\xff\x7f", good),
            (encode_frame(body, 3)[:-1] + b"]", good),
            (encode_frame(body, 3), good[:1]),
            (encode_frame(body, 3), [good[2], *good[1:]]),
            (encode_frame(body, 3), [good[1], *good[1:]]),
            (encode_frame(doubled, 3), good),
            (encode_frame({**body, "session": pair.sender.session}, 3), good),
        ]:
            assert b'"ok":false' in await asyncio.to_thread(talk, pair.prefill.handoff, data, fds)
        await until(lambda: pair.prefill.descriptors() == before, "no descriptor is left")
        assert pair.prefill.mappings() == 1
        inbox, transfer = await pair.open([5], [6])
        await pair.run_step((transfer, 0, 1, True))
        await pair.full(inbox)
        model.close()


async def test_a_second_agent_on_the_same_sockets_does_not_start(directory):
    with agents(directory, FABRICS[0], "a") as (agent,):
        async with worker(agent.target) as client:
            await client.describe()
            second = Agent(directory, "a", FABRICS[0])
            assert second.process is not None
            assert await asyncio.to_thread(second.process.wait, 15) != 0
            assert "SocketInUse" in second.log.read_text()
            await client.describe()
            async with worker(agent.target) as newcomer:
                await newcomer.describe()
        agent.kill()
        agent.start()
        async with worker(agent.target) as client:
            await client.describe()


async def test_shutdown_ends_sessions_and_unlinks(directory):
    async with setting(directory, FABRICS[0]) as pair:
        await pair.open([0, 1], [0, 1])
        assert await asyncio.to_thread(pair.prefill.stop) == 0
        failed = await pair.receiver.event("inbox_failed")
        assert (failed.reason, failed.quiesced) == ("SESSION_ENDED", True)
        assert await pair.sender.end() == "OK"
        assert not list(directory.glob("p.s*"))
        assert not list(directory.glob("p.ho"))
