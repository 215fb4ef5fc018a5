import asyncio

import pytest

from baton_engine.errors import EngineDied
from baton_worker import agent_link
from baton_worker.agent_link import AgentLink
from baton_worker.errors import AgentUnavailable, EngineUnavailable
from conditions import until
from fake_agent import FakeAgent, refuse
from fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(agent_link, "FIRST_DELAY_S", 0.002)
    monkeypatch.setattr(agent_link, "LONGEST_DELAY_S", 0.01)


@pytest.fixture
async def agent():
    agent = await FakeAgent().start()
    yield agent
    await agent.close()


@pytest.fixture
async def engine(agent):
    return FakeEngine(agent=agent)


@pytest.fixture
async def link(agent, engine):
    changes = []
    async with agent.channel() as channel:
        link = AgentLink([engine], channel, lambda: changes.append(link.current))
        link.changes = changes
        engine.on_agent_lost = lambda lost: link.agent_gone(lost.session)
        yield link
        await link.stop()


async def test_attaches_and_tells(agent, engine, link):
    link.start()
    session = await link.session(5)
    assert session is link.current and session.session == engine.attached[0]
    assert session.descriptor == agent.descriptor
    await until(lambda: link.changes == [session])


async def test_who_asks_too_early_waits_and_who_waits_too_long_is_told(link):
    waiting = [asyncio.create_task(link.session(5)) for _ in range(3)]
    with pytest.raises(AgentUnavailable, match="no transfer agent"):
        await link.session(0.01)
    link.start()
    sessions = await asyncio.gather(*waiting)
    assert sessions == [link.current] * 3


async def test_who_waits_when_it_stops_is_told(link):
    waiting = asyncio.create_task(link.session(60))
    await asyncio.sleep(0)
    await link.stop()
    with pytest.raises(EngineUnavailable):
        await waiting


async def test_attaches_again_when_the_agent_ends_the_session(agent, engine, link):
    link.start()
    first = await link.session(5)
    agent.end(first.session)
    await until(lambda: len(engine.attached) == 2 and link.current is not None, "another session")
    second = await link.session(5)
    assert second is not first and first.lost.done()
    assert link.changes == [first, None, second]


async def test_attaches_to_the_successor_of_a_restarted_agent(agent, engine, link):
    link.start()
    first = await link.session(5)
    await agent.restart()
    await until(lambda: link.current not in (None, first), "another session")
    assert link.current.descriptor.incarnation == first.descriptor.incarnation + 1


async def test_an_agent_that_stays_away_is_lost_when_the_model_process_says_so(agent, engine, link):
    link.start()
    first = await link.session(5)
    await agent.stop()
    engine.lose_agent()
    await first.lost
    await until(lambda: link.current is None)
    with pytest.raises(AgentUnavailable):
        await link.session(0.01)
    await agent.start()
    assert await link.session(5) is not first


async def test_notices_about_former_sessions_are_nothing(agent, engine, link):
    link.start()
    session = await link.session(5)
    link.agent_gone(session.session + 1)
    assert not session.lost.done()


async def test_refused_hand_offs_are_tried_again_and_told_once(engine, link, caplog):
    engine.attach_failures = 5
    link.start()
    await link.session(5)
    assert caplog.text.count("cannot attach") == 1


async def test_an_agent_that_drops_every_session_at_once_is_not_asked_in_a_tight_loop(agent, engine, link, monkeypatch):
    delays = []
    monkeypatch.setattr(agent_link, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(agent_link, "LONGEST_DELAY_S", 0.04)
    sleep = asyncio.sleep

    async def measured(seconds):
        # Whoever waits for the test's condition sleeps too.
        if asyncio.current_task() is link._task:
            delays.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(agent_link.asyncio, "sleep", measured)

    def end_at_once():
        if link.current is not None:
            agent.end(link.current.session)

    link._on_change = end_at_once
    link.start()
    await until(lambda: len(delays) >= 4, "pauses between the sessions")
    assert delays[:4] == [0.01, 0.02, 0.04, 0.04]


async def test_an_agent_that_fails_while_describing_itself(agent, link):
    agent.before["Describe"] = refuse("INTERNAL")
    link.start()
    await until(lambda: agent.calls["Describe"] >= 3)
    del agent.before["Describe"]
    await link.session(5)


async def test_a_dead_engine_ends_the_attempts(agent, engine, link):
    engine.exited.set_result(EngineDied("gone"))
    link.start()
    with pytest.raises(EngineDied, match="gone"):
        await asyncio.wait_for(link.join(), 5)
