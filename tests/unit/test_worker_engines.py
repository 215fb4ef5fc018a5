"""A worker's engines, one or several: they are ready together and die together."""

import asyncio

import pytest

from baton_engine.client import EngineClient
from baton_engine.errors import EngineDied, EngineStartFailed
from baton_engine.messages import EngineSpec
from baton_engine.ranks import engine_specs
from baton_engine.scheduler import Sequence
from baton_worker.agent_link import AgentLink
from baton_worker.agent_session import AgentSession
from baton_worker.engine_actor import EngineActor, NoHooks
from baton_worker.engine_host import EngineHost
from baton_worker.engines import WorkerEngines
from baton_worker.errors import AgentUnavailable, EngineUnavailable, ExceedsPagePool, QueueFull, ReservationTimeout
from conditions import settle, until
from fake_agent import FakeAgent
from fake_engine import Engines, FakeEngine


class Hooks(NoHooks):
    raises = False

    def before_step(self, plan):
        if self.raises:
            raise RuntimeError("a hook is broken")


@pytest.fixture
async def agent():
    agent = await FakeAgent().start()
    yield agent
    await agent.close()


@pytest.fixture
async def engines(monkeypatch, agent):
    engines = Engines({"agent": agent})
    monkeypatch.setattr(EngineClient, "start", engines.start)
    return engines


@pytest.fixture
async def make(agent, engines):
    hosts, channel = [], agent.channel()

    def make(with_agent=True, count=1):
        changes = []
        members = [
            EngineHost(
                spec,
                chunk_tokens=8,
                max_waiting=8,
                start_timeout_s=5,
                hooks=Hooks(),
                on_change=lambda: changes.append(host.ready),
            )
            for spec in engine_specs(EngineSpec(model_path="fake"), count)
        ]
        host = WorkerEngines(members, channel if with_agent else None, lambda: changes.append(host.ready))
        host.changes = changes
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        if all(hasattr(each, "actor") for each in host.hosts):
            await host.stop()
    await channel.close()


async def submit(host):
    return await submit_to(host.hosts[0])


async def submit_to(engine, number=1):
    pages = (await engine.reserver.reserve(number, 2, None)).pages
    return engine.actor.submit(Sequence(number, (1, 2, 3), tuple(pages), max_tokens=2), number)


async def first(stream):
    return await anext(aiter(stream))


async def test_is_ready_once_the_agent_has_its_memory(make, engines):
    host = make()
    assert not host.alive and not host.ready
    await host.start()
    await until(lambda: host.ready)
    assert host.alive and host.session.session == engines.last.attached[0]
    assert host.changes[-1] is True
    assert host.layout.pages == host.hosts[0].reserver.pool.total == 16


async def test_without_an_agent_it_is_ready_at_once(make):
    host = make(with_agent=False)
    await host.start()
    assert host.ready and host.session is None
    with pytest.raises(AgentUnavailable):
        host.hosts[0].link  # noqa: B018


async def test_the_death_of_the_model_process_ends_it_as_a_whole(make, engines):
    host = make()
    await host.start()
    stream = await submit(host)
    await engines.last.begun(0)
    waiting = asyncio.create_task(host.hosts[0].reserver.reserve(2, 16, 60))
    await until(lambda: host.hosts[0].reserver.waiting)
    joining = asyncio.create_task(host.join())
    engines.last.die()
    with pytest.raises(EngineDied, match="SIGKILL"):
        await joining
    for future in (first(stream), waiting):
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await asyncio.wait_for(future, 5)
    assert not host.alive and not host.ready and host.changes[-1] is False
    assert engines.last.stopped


async def test_a_broken_hook_ends_it_as_a_whole(make, engines):
    host = make()
    await host.start()
    host.hosts[0]._hooks.raises = True
    stream = await submit(host)
    with pytest.raises(RuntimeError, match="hook"):
        await asyncio.wait_for(host.join(), 5)
    with pytest.raises(EngineUnavailable, match="hook"):
        await first(stream)
    assert engines.last.stopped and not host.alive


@pytest.mark.parametrize("broken", ["_attach", "_deliver"])
async def test_a_link_to_the_agent_that_breaks_in_no_known_way_ends_it_as_a_whole(make, engines, monkeypatch, broken):
    """Not in silence: without a link the worker would never be ready again."""

    def fail(self, *arguments):
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(AgentLink if broken == "_attach" else AgentSession, broken, fail)
    host = make()
    await host.start()
    with pytest.raises(KeyError, match="nobody"):
        await asyncio.wait_for(host.join(), 5)
    assert engines.last.stopped and not host.alive


async def test_who_stops_watching_leaves_it_running(make, engines):
    host = make()
    await host.start()
    joining = asyncio.create_task(host.join())
    await asyncio.sleep(0)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert host.alive and host.hosts[0].actor.running and not engines.last.stopped


async def test_stopping_is_told_to_whoever_is_served_and_may_be_repeated(make, engines):
    host = make()
    await host.start()
    stream = await submit(host)
    await host.stop()
    await host.stop()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await first(stream)
    assert engines.last.stopped


async def test_a_start_that_fails_half_way_leaves_no_model_process(make, engines, monkeypatch):
    async def fail(self):
        raise RuntimeError("no scheduler today")

    monkeypatch.setattr(EngineActor, "start", fail)
    with pytest.raises(RuntimeError, match="no scheduler"):
        await make().start()
    assert engines.last.stopped


async def test_a_model_that_does_not_load(make, engines):
    engines.failures.append(EngineStartFailed("no such file", cause="TEST"))
    host = make()
    with pytest.raises(EngineStartFailed):
        await host.start()
    assert not host.alive and not host.ready


# --- data-parallel engines ------------------------------------------------------------------------------------------


async def test_all_engines_attach_under_one_session_each_with_a_pool_of_its_own(make, engines):
    host = make(count=3)
    await host.start()
    await until(lambda: host.ready)
    assert [spec.dp_rank for spec in engines.specs] == [0, 1, 2]
    assert {spec.data_parallel for spec in engines.specs} == {3} and host.shard_map.dp == 3
    assert {engine.attached[-1] for engine in engines.made} == {host.session.session}
    assert len({id(each.reserver.pool) for each in host.hosts}) == 3
    assert all(each.link.current is host.session for each in host.hosts)


async def test_requests_go_to_the_emptiest_engine(make):
    host = make(count=2)
    await host.start()
    first, _ = await host.reserve("a", 4, None, None)
    second, _ = await host.reserve("b", 2, None, None)
    assert second is not first
    # 12 pages are free on one, 14 on the other.
    assert (await host.reserve("c", 13, None, None))[0] is second


@pytest.fixture
async def full(make):
    """Two engines without a free page: "a" has those of the first, "b" those of the second."""
    host = make(count=2)
    await host.start()
    assert [(await host.reserve(owner, 16, None, None))[0] for owner in ("a", "b")] == list(host.hosts)
    return host


def queues(host):
    return [each.reserver.waiting for each in host.hosts]


async def test_who_waits_is_taken_by_another_engine_that_has_the_pages_first(full):
    waiting = asyncio.create_task(full.reserve("c", 5, 60, None))
    await until(lambda: queues(full) == [1, 0])
    full.hosts[1].reserver.release("b")
    engine, reservation = await asyncio.wait_for(waiting, 5)
    assert engine is full.hosts[1] and len(reservation.pages) == 5
    await until(lambda: queues(full) == [0, 0])
    assert "c" not in full.hosts[0].reserver.pool.owners


async def test_who_waits_for_many_pages_neither_holds_another_engine_back_nor_is_overtaken_at_its_own(full):
    first, second = full.hosts
    many = asyncio.create_task(full.reserve("many", 16, 60, None))
    await until(lambda: queues(full) == [1, 0])
    few = asyncio.create_task(full.reserve("few", 1, 60, None))
    await until(lambda: queues(full) == [1, 1])
    also_few = asyncio.create_task(full.reserve("also few", 1, 60, None))
    await until(lambda: queues(full) == [2, 1])
    second.reserver.release("b")
    assert (await asyncio.wait_for(few, 5))[0] is (await asyncio.wait_for(also_few, 5))[0] is second
    first.reserver.release("a")
    assert (await asyncio.wait_for(many, 5))[0] is first


async def test_what_comes_from_both_at_once_is_taken_from_one(full):
    waiting = asyncio.create_task(full.reserve("c", 1, 60, None))
    await until(lambda: any(queues(full)))
    for each, owner in zip(full.hosts, ("a", "b"), strict=True):
        each.reserver.release(owner)
    engine, _ = await asyncio.wait_for(waiting, 5)
    assert sorted(each.reserver.pool.free for each in full.hosts) == [15, 16] and engine.reserver.pool.free == 15


@pytest.mark.parametrize("granted", [(), (0,), (1,), (0, 1)])
async def test_who_gives_up_waiting_holds_nothing_anywhere(full, granted):
    waiting = asyncio.create_task(full.reserve("c", 16, 60, None))
    await until(lambda: any(queues(full)))
    for number in granted:
        full.hosts[number].reserver.release("ab"[number])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await until(lambda: not any(each.reserver.waiting or "c" in each.reserver.pool.owners for each in full.hosts))


async def test_who_cannot_have_the_pages_is_told(full):
    with pytest.raises(ExceedsPagePool):
        await full.reserve("c", 17, None, None)
    with pytest.raises(ReservationTimeout):
        await full.reserve("c", 1, 0.01, None)
    waiting = [asyncio.create_task(full.reserve(number, 1, 60, None)) for number in range(16)]
    await until(lambda: queues(full) == [8, 8])
    with pytest.raises(QueueFull):
        await full.reserve("d", 1, 60, None)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_death_of_one_engine_ends_all_of_them(make, engines):
    host = make(count=2)
    await host.start()
    streams = [await submit_to(each, number) for number, each in enumerate(host.hosts)]
    joining = asyncio.create_task(host.join())
    engines.made[1].die()
    with pytest.raises(EngineDied, match="SIGKILL"):
        await joining
    for stream in streams:
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await asyncio.wait_for(first(stream), 5)
    assert all(engine.stopped for engine in engines.made) and not host.alive


@pytest.mark.parametrize("count", [1, 2])
async def test_an_engine_that_dies_while_it_attaches_is_what_all_of_them_end_of(make, engines, monkeypatch, count):
    attaching = asyncio.Event()

    async def attach(engine, handoff_path, session):
        attaching.set()
        await asyncio.wait([engine.exited])
        raise EngineDied(str(engine.exited.result()))

    async def stop(engine):
        # A process takes a while to end.
        await settle()
        engine.stopped = True
        engine.die()

    monkeypatch.setattr(FakeEngine, "attach", attach)
    monkeypatch.setattr(FakeEngine, "stop", stop)
    host = make(count=count)
    await host.start()
    stream = await submit(host)
    joining = asyncio.create_task(host.join())
    await attaching.wait()
    engines.made[-1].die()
    with pytest.raises(EngineDied, match="SIGKILL"):
        await asyncio.wait_for(joining, 5)
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        await asyncio.wait_for(first(stream), 5)
    assert all(engine.stopped for engine in engines.made) and not host.alive


async def test_an_engine_that_does_not_start_leaves_none_of_the_others(make, engines):
    engines.failures.append(EngineStartFailed("no room for a second", cause="TEST"))
    host = make(count=2)
    with pytest.raises(EngineStartFailed):
        await host.start()
    assert all(engine.stopped for engine in engines.made) and not host.alive
