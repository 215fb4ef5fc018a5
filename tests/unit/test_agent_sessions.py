"""Sessions: ranks come, contradict each other, go; and workers that do not listen. Over a fake engine."""

import asyncio
from dataclasses import replace

import pytest
from baton.v1 import agent_pb2

import fake_fabric
from agent_kit import Model, worker
from baton_agent.errors import InvalidArgument
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_agent.servicers import TransferAgentServicer
from baton_agent.sessions import FindEvents
from baton_fabric.errors import FabricError
from baton_memory import HandoffError, SocketPathInvalid
from baton_rpc import AddressError, InsecureAddressError, RemoteError
from conditions import until


class Agent:
    def __init__(self, directory, options: AgentOptions) -> None:
        self.engine = fake_fabric.Engine(fake_fabric.Network())
        self.target = f"unix:{directory}/a"
        addresses = Addresses(self.target, f"{directory}/h", "127.0.0.1:0")
        self.service = TransferAgentService(self.engine, "fake", "node", addresses, options)


@pytest.fixture
def options():
    return AgentOptions(shutdown_timeout=1.0)


@pytest.fixture
async def agent(tmp_path, options):
    agent = Agent(tmp_path, options)
    await agent.service.start()
    yield agent
    await agent.service.stop()


@pytest.fixture
def models():
    made: list[Model] = []

    def make(*arguments: int) -> Model:
        made.append(Model(*arguments))
        return made[-1]

    yield make
    for model in made:
        model.close()


async def refusal(attaching) -> tuple[str, str]:
    with pytest.raises(HandoffError) as error:
        await attaching
    return error.value.status, error.value.reason


async def test_a_session_is_ready_when_all_ranks_are_there_and_ends_with_the_first_that_goes(agent, models):
    ranks = [models(1, rank, 2) for rank in range(2)]
    async with worker(agent.target) as client:
        await client.describe()
        await ranks[1].attach(client.handoff_path, client.session)
        client.follow()
        with pytest.raises(RemoteError) as error:
            await client.open_inbox(client.agent, 1)
        assert error.value.reason == "UNKNOWN_SESSION"
        assert not client.events
        await ranks[0].attach(client.handoff_path, client.session)
        ready = await client.event("session_ready")
        assert [region.rank for region in ready.regions] == [0, 1]
        assert [region.length for region in ready.regions] == [rank.memory.length for rank in ranks]
        ranks[0].leave()
        assert await client.end() == "OK"
        await until(lambda: agent.service.sessions.count == 0)
        assert not agent.engine.regions
        assert not agent.engine.counters
        # The other rank's process is told, and a late rank does not bring the session back.
        assert await refusal(ranks[0].attach(client.handoff_path, client.session)) == (
            "FAILED_PRECONDITION",
            "SESSION_CONFLICT",
        )


async def test_contradicting_ranks_are_refused_and_change_nothing(agent, models):
    first, again = models(1, 0, 2), models(1, 0, 2)
    whole, other, odd = models(2, 1, 2), models(1, 1, 2), models(1, 1, 2)
    async with worker(agent.target) as client:
        await client.describe()
        path, session = client.handoff_path, client.session
        await first.attach(path, session)
        conflict = ("FAILED_PRECONDITION", "SESSION_CONFLICT")
        assert await refusal(again.attach(path, session)) == conflict
        assert await refusal(whole.attach(path, session, kv_heads=2)) == conflict
        assert await refusal(other.attach(path, session, dtype="int32")) == conflict
        assert await refusal(models(1, 0, 3).attach(path, session + 1)) == (
            "INVALID_ARGUMENT",
            "KV_SHARDING_IMPOSSIBLE",
        )
        assert len(agent.engine.regions) == 1
        await odd.attach(path, session)
        client.follow()
        await client.event("session_ready")


async def test_memory_that_the_fabric_refuses_leaves_no_session(agent, models, monkeypatch):
    async def refuse(fd: int, length: int, domains: object) -> tuple[int, int, int]:
        raise FabricError("cannot map", "INVALID_ARGUMENT", "BAD_REGION")

    model = models()
    async with worker(agent.target) as client:
        await client.describe()
        monkeypatch.setattr(agent.engine, "register_region", refuse)
        assert await refusal(model.attach(client.handoff_path, client.session)) == ("INVALID_ARGUMENT", "BAD_REGION")
        await until(lambda: agent.service.sessions.count == 0)
        monkeypatch.undo()
        await model.attach(client.handoff_path, client.session)


async def test_a_counter_that_the_fabric_refuses_leaves_no_region(agent, models, monkeypatch):
    def refuse(memory_fd: int, doorbell_fd: int, rung: bool) -> int:
        raise FabricError("no counter", "INVALID_ARGUMENT", "BAD_COUNTER")

    monkeypatch.setattr(agent.engine, "attach_counter", refuse)
    async with worker(agent.target) as client:
        await client.describe()
        assert await refusal(models().attach(client.handoff_path, 5)) == ("INVALID_ARGUMENT", "BAD_COUNTER")
    assert not agent.engine.regions


@pytest.mark.parametrize("options", [AgentOptions(max_sessions=1, shutdown_timeout=1.0)])
async def test_sessions_are_limited(agent, models):
    first, second = models(), models()
    async with worker(agent.target, first) as client:
        assert await refusal(second.attach(client.handoff_path, 5)) == ("RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS")
        first.leave()
        assert await client.end() == "OK"
        await second.attach(client.handoff_path, 5)


async def test_events_of_an_unknown_session_are_refused(agent):
    async with worker(agent.target) as client:
        await client.describe()
        client.follow()
        assert await client.end() == "UNKNOWN_SESSION"


async def test_events_from_the_beginning_reach_a_worker_that_comes_late_or_again(agent, models):
    async with worker(agent.target, models()) as client:
        inbox = await client.open_inbox(client.agent, 0)
        await client.event("inbox_full", lambda event: event.slot == inbox.slot)
        assert client.reader is not None
        client.reader.cancel()
        await asyncio.gather(client.reader, return_exceptions=True)
        later = await client.open_inbox(client.agent, 0)
        client.follow()
        await client.event("inbox_full", lambda event: event.slot == later.slot)


async def test_what_was_under_way_in_a_stream_that_broke_comes_again(agent, models):
    """The agent has sent it, and nobody has read it."""
    async with worker(agent.target) as client:
        await client.describe()
        await models().attach(client.handoff_path, client.session)
        log = await agent.service.sessions.ask(FindEvents(client.session))
        await until(lambda: len(log) == 1)
        stream = client.stub.Events(agent_pb2.EventsRequest(session=client.session))
        inboxes = [await client.open_inbox(client.agent, 0) for _ in range(3)]
        await until(lambda: len(log) == 0)
        stream.cancel()
        client.follow()
        await client.event("session_ready")
        for inbox in inboxes:
            await client.event("inbox_full", lambda event, inbox=inbox: event.slot == inbox.slot)


async def test_a_worker_that_never_reads_loses_its_session(agent, models, monkeypatch):
    monkeypatch.setattr("baton_agent.event_log.EventLog.__init__.__defaults__", (3,))
    model = models()
    async with worker(agent.target) as client:
        await client.describe()
        await model.attach(client.handoff_path, client.session)
        for _ in range(2):
            await client.open_inbox(client.agent, 0)
        await until(lambda: agent.service.receiver.open_inboxes == 0)
        last = await client.open_inbox(client.agent, 0)
        assert last.slot == 2
        await until(lambda: agent.service.sessions.count == 0)
        assert model.connection is not None
        readable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(model.connection.fileno(), lambda: readable.done() or readable.set_result(None))
        await asyncio.wait_for(readable, 5)
        loop.remove_reader(model.connection.fileno())


async def test_a_failed_actor_ends_the_agent(agent, models, monkeypatch):
    async with worker(agent.target, models()) as client:
        inbox = await client.open_inbox(client.agent, 1)

        def fail(slot: int, generation: int) -> bool:
            raise FabricError("stalled", "DEADLINE_EXCEEDED", "ENGINE_STALLED")

        monkeypatch.setattr(agent.engine, "close_inbox", fail)
        agent.engine.arrive(inbox.slot, inbox.generation, 1)
        error = await asyncio.wait_for(asyncio.shield(agent.service.failed), 5)
        assert getattr(error, "reason", "") == "ENGINE_STALLED"
        assert agent.service.problem() is not None
        monkeypatch.undo()


async def test_an_agent_whose_clock_stops_ends(agent, monkeypatch):
    """Idle connections, retried fences and the end of quarantines hang on it."""

    async def fail():
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(agent.service.peers, "close_idle", fail)
    with pytest.raises(KeyError, match="nobody"):
        await asyncio.wait_for(agent.service.failure(), 5)


async def test_a_failed_engine_ends_the_agent(agent):
    assert agent.service.problem() is None
    agent.engine.emit(fake_fabric.EngineFailed("cq gone"))
    with pytest.raises(Exception, match="cq gone"):
        await asyncio.wait_for(agent.service.failure(), 5)


async def test_a_hand_off_during_shutdown_is_refused(agent, models):
    first, second = models(), models()
    async with worker(agent.target, first) as client:
        inbox = await client.open_inbox(client.agent, 1)
        transfer = await client.open_transfer(inbox, [0], [0])
        assert transfer == 1
        agent.engine.hold = True
        stopping = asyncio.create_task(agent.service.stop())
        assert await client.end() in {"OK", "UNAVAILABLE", "CANCELLED"}
        await stopping
        with pytest.raises(HandoffError):
            await second.attach(client.handoff_path, 5)


async def test_unusable_addresses(tmp_path, options):
    engine = fake_fabric.Engine(fake_fabric.Network())
    good = Addresses(f"unix:{tmp_path}/a", f"{tmp_path}/h", "127.0.0.1:0")
    for addresses, kind in [
        (replace(good, socket="127.0.0.1:0"), InvalidArgument),
        (replace(good, socket="unix:/tmp/" + "x" * 95), SocketPathInvalid),
        (replace(good, handoff="/tmp/" + "x" * 95), SocketPathInvalid),
        (replace(good, control="0.0.0.0:0"), InsecureAddressError),
        (replace(good, control="unix:/tmp/c"), InvalidArgument),
    ]:
        with pytest.raises(kind):
            TransferAgentService(engine, "fake", "node", addresses, options)
    wild = TransferAgentService(
        engine, "fake", "node", replace(good, control="0.0.0.0:0"), options, allow_insecure=True
    )
    with pytest.raises(AddressError, match="advertise_host"):
        await wild.start()
    await wild.stop()
    named = TransferAgentService(
        fake_fabric.Engine(fake_fabric.Network()),
        "fake",
        "node",
        replace(good, control="0.0.0.0:0", advertise_host="node-7"),
        options,
        allow_insecure=True,
    )
    await named.start()
    async with worker(good.socket) as client:
        await client.describe()
        assert client.agent.control_address.startswith("node-7:")
    await named.stop()


async def test_what_a_caller_that_gave_up_opened_is_closed_again(agent, models, monkeypatch):
    service = agent.service
    servicer = TransferAgentServicer(
        service.descriptor,
        "",
        service.describe_domains,
        service.sessions,
        service.sender,
        service.receiver,
        service.metrics,
    )
    asked, gate = asyncio.Event(), asyncio.Event()

    async def confirm(peer: object) -> None:
        asked.set()
        await gate.wait()

    monkeypatch.setattr(service.peers, "confirm", confirm)
    async with worker(agent.target, models()) as client:
        inbox = await client.open_inbox(client.agent, 3)
        call = asyncio.create_task(
            servicer.OpenTransfer(
                agent_pb2.OpenTransferRequest(
                    session=client.session, inbox=inbox, source_pages=[0], destination_pages=[0]
                ),
                None,
            )
        )
        await asyncio.wait_for(asked.wait(), 5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert service.sender.open_transfers == 1
        gate.set()
        await until(lambda: service.sender.open_transfers == 0)
        failed = await client.event("inbox_failed")
        assert failed.reason == "CANCELLED_BY_SENDER"

        call = asyncio.create_task(
            servicer.OpenInbox(
                agent_pb2.OpenInboxRequest(session=client.session, sender=client.agent, expected_extents=1), None
            )
        )
        # The question is in the mailbox, and not yet answered.
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: service.receiver.open_inboxes == 0)
