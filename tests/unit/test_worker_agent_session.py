import asyncio

import grpc
import pytest
from baton.v1 import agent_pb2, common_pb2

from baton_rpc import RemoteError
from baton_worker import agent_session
from baton_worker.agent_session import AgentSession
from baton_worker.errors import AgentUnavailable
from conditions import until
from fake_agent import FakeAgent, Gate, refuse

SESSION = 0xABCD
PEER = common_pb2.AgentDescriptor(version=1, incarnation=9, control_address="127.0.0.1:2")
INBOX = agent_pb2.InboxDescriptor(version=1, slot=5, generation=3)


@pytest.fixture
async def agent():
    agent = await FakeAgent().start()
    yield agent
    await agent.close()


@pytest.fixture
async def gone():
    return asyncio.get_running_loop().create_future()


@pytest.fixture
async def session(agent, gone, monkeypatch):
    monkeypatch.setattr(agent_session, "FIRST_DELAY_S", 0.005)
    agent.hand_over(SESSION)
    async with agent.channel() as channel:
        session = AgentSession(SESSION, channel, agent.descriptor, gone)
        await session.ready(5)
        yield session
        await session.close()


async def test_ready_brings_the_registered_regions(session):
    assert [region.length for region in session.regions] == [1]


async def test_an_agent_that_never_registers_the_memory(agent, gone):
    agent.hand_over(SESSION, ready=False)
    async with agent.channel() as channel:
        session = AgentSession(SESSION, channel, agent.descriptor, gone)
        with pytest.raises(AgentUnavailable, match="did not register"):
            await session.ready(0.01)
        await session.close()


async def test_a_session_that_the_agent_does_not_know_is_lost(agent, gone):
    async with agent.channel() as channel:
        session = AgentSession(SESSION, channel, agent.descriptor, gone)
        with pytest.raises(AgentUnavailable, match="does not know"):
            await session.ready(5)
        await session.close()


async def test_events_reach_the_inbox_and_the_transfer_that_they_are_of(agent, session):
    first, second = await session.open_inbox(PEER, 10), await session.open_inbox(PEER, 20)
    transfer = await session.open_transfer(INBOX, [1, 2], [3, 4])
    agent.finish(transfer.transfer, bytes=99)
    agent.fail_inbox(second.key, "ABORTED")
    agent.fill(first.key)
    assert (await first.ended).extents == 10
    assert (await second.ended).reason == "ABORTED"
    assert (await transfer.ended).stats.bytes == 99


async def test_chunk_plans_reach_the_agent_in_the_order_in_which_they_were_made(agent, session):
    """A chunk that came before the one that it follows would be refused."""
    gate = agent.before["SubmitStep"] = Gate()
    first = asyncio.create_task(session.submit_step(0, []))
    await gate.entered.wait()
    del agent.before["SubmitStep"]
    second = asyncio.create_task(session.submit_step(1, []))
    await asyncio.wait({second}, timeout=0.05)
    assert agent.steps == []
    gate.open()
    await asyncio.gather(first, second)
    assert [step.step for step in agent.steps] == [0, 1]


async def test_an_event_that_overtakes_the_answer_is_not_lost(agent, session):
    gate = agent.after["OpenInbox"] = Gate()
    opening = asyncio.create_task(session.open_inbox(PEER, 10))
    key = await agent.opened_inbox()
    agent.fill(key)
    await until(lambda: session._early, "the event")
    gate.open()
    inbox = await opening
    assert inbox.ended.done() and inbox.ended.result().extents == 10

    gate = agent.after["OpenTransfer"] = Gate()
    opening = asyncio.create_task(session.open_transfer(INBOX, [1], [2]))
    agent.fail_transfer(await agent.opened_transfer())
    await until(lambda: session._early, "the event")
    gate.open()
    assert (await opening).ended.result().reason == "PEER_FAILED"
    assert not session._early


async def test_an_event_of_a_closed_inbox_is_nothing(agent, session):
    inbox = await session.open_inbox(PEER, 10)
    other = await session.open_inbox(PEER, 10)
    assert await session.close_inbox(inbox) == "quiesced"
    agent.emit(SESSION, inbox_full=agent_pb2.InboxFull(slot=inbox.key[0], generation=inbox.key[1]))
    agent.fill(other.key)
    await other.ended
    assert not session._early
    assert list(session._inboxes) == [other.key]


async def test_a_stream_that_breaks_is_opened_again_and_resolves_nothing(agent, session):
    inbox = await session.open_inbox(PEER, 10)
    for _ in range(3):
        calls = agent.calls["Events"]
        agent.break_streams()
        await until(lambda calls=calls: agent.calls["Events"] > calls, "another stream")
    assert not inbox.ended.done() and not session.lost.done()
    agent.fill(inbox.key)
    await inbox.ended


async def test_a_stream_that_stays_broken_is_reported_once(agent, session, caplog):
    agent.before["Events"] = refuse("UNAVAILABLE")
    calls = agent.calls["Events"]
    agent.break_streams()
    await until(lambda: agent.calls["Events"] >= calls + 4, "attempts")
    assert caplog.text.count("broke") == 1


async def test_the_end_of_the_session_ends_everything_as_quiesced(agent, session):
    inbox = await session.open_inbox(PEER, 10)
    transfer = await session.open_transfer(INBOX, [1], [2])
    agent.end(SESSION)
    assert "ended the session" in await session.lost
    assert (await inbox.ended).quiesced and (await transfer.ended).quiesced
    for call in (session.open_inbox(PEER, 1), session.close_inbox(inbox), session.cancel_transfer(transfer)):
        with pytest.raises(AgentUnavailable):
            await call


async def test_an_agent_that_is_gone_is_believed_gone_only_when_the_model_process_says_so(agent, gone, session):
    inbox = await session.open_inbox(PEER, 10)
    agent.before["Events"] = refuse("UNAVAILABLE")
    calls = agent.calls["Events"]
    agent.break_streams()
    await until(lambda: agent.calls["Events"] >= calls + 3, "attempts")
    assert not session.lost.done() and not inbox.ended.done()
    gone.set_result(None)
    assert "gone" in await session.lost
    assert (await inbox.ended).quiesced


async def test_an_answer_after_the_end_of_the_session_opens_nothing(agent, session):
    """Otherwise its end would be awaited for ever."""
    gate = agent.after["OpenTransfer"] = Gate()
    opening = asyncio.create_task(session.open_transfer(INBOX, [1], [2]))
    await gate.entered.wait()
    agent.end(SESSION)
    await session.lost
    gate.open()
    with pytest.raises(AgentUnavailable):
        await opening


@pytest.mark.parametrize("held_up", ["before", "after"])
async def test_a_cancelled_opening_leaves_nothing_at_the_agent(agent, session, held_up):
    for name, opening in (
        ("OpenInbox", session.open_inbox(PEER, 10)),
        ("OpenTransfer", session.open_transfer(INBOX, [1], [2])),
    ):
        gate = getattr(agent, held_up)[name] = Gate()
        task = asyncio.create_task(opening)
        await gate.entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
    await until(lambda: agent.closed and agent.cancelled, "both undone")
    assert not agent.inboxes and not agent.transfers
    await until(lambda: not session._inboxes and not session._transfers, "both forgotten")


async def test_undoing_is_tried_until_the_agent_answers(agent, session):
    attempts = []

    async def busy_once(request, context):
        attempts.append(request)
        if len(attempts) == 1:
            await refuse("UNAVAILABLE")(request, context)

    gate = agent.after["OpenInbox"] = Gate()
    agent.before["CloseInbox"] = busy_once
    task = asyncio.create_task(session.open_inbox(PEER, 10))
    await gate.entered.wait()
    task.cancel()
    gate.open()
    await until(lambda: agent.closed, "the inbox closed")


async def test_what_the_agent_does_not_know_is_forgotten_and_what_it_only_refuses_is_not(agent, session):
    inbox = await session.open_inbox(PEER, 10)
    transfer = await session.open_transfer(INBOX, [0], [1])
    for status, kept in (("INTERNAL", 1), ("NOT_FOUND", 0)):
        agent.before["CloseInbox"] = agent.before["CancelTransfer"] = refuse(status)
        for ending in (session.close_inbox(inbox), session.cancel_transfer(transfer)):
            with pytest.raises(RemoteError):
                await ending
        assert (len(session._inboxes), len(session._transfers)) == (kept, kept)


async def test_refusals_and_absence_are_told_apart(agent, session, monkeypatch, caplog):
    agent.before["OpenInbox"] = refuse("RESOURCE_EXHAUSTED", "SLOTS_EXHAUSTED")
    with pytest.raises(RemoteError) as caught:
        await session.open_inbox(PEER, 10)
    assert caught.value.reason == "SLOTS_EXHAUSTED"
    agent.before["OpenInbox"] = refuse("UNAVAILABLE")
    with pytest.raises(AgentUnavailable):
        await session.open_inbox(PEER, 10)
    monkeypatch.setattr(agent_session, "CALL_TIMEOUT_S", 0.02)
    agent.before["OpenInbox"] = Gate()
    with pytest.raises(AgentUnavailable):
        await session.open_inbox(PEER, 10)
    # The caller has them; they are no unhandled failures.
    assert "Traceback" not in caplog.text


async def test_a_session_that_is_closed_fails_who_is_in_a_call(agent, session):
    agent.before["OpenInbox"] = gate = Gate()
    opening = asyncio.create_task(session.open_inbox(PEER, 10))
    await gate.entered.wait()
    await session.close()
    with pytest.raises(AgentUnavailable):
        await opening


async def test_the_steps_and_ends_of_transfers_reach_the_agent(agent, session):
    transfer = await session.open_transfer(INBOX, [1, 2], [3, 4])
    assert list(agent.transfers[transfer.transfer].source_pages) == [1, 2]
    assert list(agent.transfers[transfer.transfer].destination_pages) == [3, 4]
    chunk = agent_pb2.ChunkPlan(transfer=transfer.transfer, first_page=0, pages=2, last=True)
    await session.submit_step(4, [chunk])
    assert agent.steps[0].step == 4 and list(agent.steps[0].chunks) == [chunk]
    await session.cancel_transfer(transfer)
    assert agent.cancelled == [transfer.transfer]
    with pytest.raises(RemoteError):
        await session.close_inbox(agent_session.Inbox(INBOX, asyncio.get_running_loop().create_future()))


async def test_nothing_is_left_running_after_close(agent, gone):
    before = asyncio.all_tasks()
    agent.hand_over(SESSION)
    channel = agent.channel()
    session = AgentSession(SESSION, channel, agent.descriptor, gone)
    await session.ready(5)
    await session.close()
    assert session._pump.done() and len(session._background) == 0
    await channel.close()
    assert isinstance(channel, grpc.aio.Channel)
    leftover = {task.get_name() for task in asyncio.all_tasks() - before}
    assert not {name for name in leftover if name.startswith("agent-events")}
