import asyncio

import grpc
import pytest
from baton.v1 import prefill_pb2

from baton_prefill import servicer as module
from baton_rpc import RemoteError
from baton_worker import letting_go
from conditions import settle, until
from fake_agent import Gate, refuse
from prefill_rig import prefill_rig
from prefill_rig import run_request as request


@pytest.fixture
async def rig(monkeypatch, tmp_path):
    async with prefill_rig(monkeypatch, tmp_path) as rig:
        yield rig


def outcomes(rig, metric=None):
    (family,) = (metric or rig.metrics.requests).collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return RemoteError.from_rpc(caught.value)


async def test_a_prompt_in_two_chunks(rig):
    call = rig.stub.Run(request(rig, tokens=14))
    await rig.engine.begun(0)
    transfer = await rig.agent.opened_transfer()
    opened = rig.agent.transfers[transfer]
    assert opened.inbox.slot == 5 and list(opened.destination_pages) == [50, 51, 52, 53]
    assert len(opened.source_pages) == 4 and rig.pool.free == 12
    rig.engine.finish()
    await rig.engine.begun(1)
    rig.engine.finish()
    await until(lambda: len(rig.agent.steps) == 2)
    chunks = [(step.step, [(c.first_page, c.pages, c.last) for c in step.chunks]) for step in rig.agent.steps]
    assert chunks == [(0, [(0, 2, False)]), (1, [(2, 2, True)])]
    assert not call.done()
    rig.agent.finish(transfer, bytes=77, duration_us=5)
    response = await call
    assert [chunk.tokens for chunk in response.chunks] == [8, 5]
    assert all(chunk.compute_us == 5000 for chunk in response.chunks)
    assert response.transfer.bytes == 77
    await rig.idle()
    assert rig.agent.cancelled == [] and outcomes(rig) == {"ok": 1}
    metrics = rig.worker._metrics
    assert outcomes(rig, metrics.transfers) == {"done": 1}
    assert metrics.computed_prompt_tokens._value.get() == 13
    assert metrics.step_seconds._sum.get() == pytest.approx(0.01) and metrics.step_tokens._sum.get() == 13
    assert not rig.sender._outgoing


async def test_the_transfer_may_end_before_the_step_is_told(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    transfer = await rig.agent.opened_transfer()
    rig.engine.finish()
    await rig.engine.begun(1)
    rig.agent.finish(transfer)
    await settle()
    rig.engine.finish()
    response = await call
    assert [chunk.tokens for chunk in response.chunks] == [8, 1]
    await rig.idle()


async def test_a_prefix_that_is_there_is_computed_but_not_sent(rig):
    call = rig.stub.Run(request(rig, tokens=9, prefix=4))
    await rig.engine.begun(0)
    transfer = await rig.agent.opened_transfer()
    opened = rig.agent.transfers[transfer]
    assert len(opened.source_pages) == len(opened.destination_pages) == 1
    assert rig.pool.free == 14
    rig.engine.finish()
    await until(lambda: rig.agent.steps)
    (chunk,) = rig.agent.steps[0].chunks
    assert (chunk.first_page, chunk.pages, chunk.last) == (0, 1, True)
    rig.agent.finish(transfer)
    await call
    await rig.idle()


@pytest.mark.parametrize(
    ("page_size", "prefix", "pages", "source", "chunks"),
    [
        # Pages of 2 tokens there, 4 here: the plans count in those of 2, of which the first 3 are there already.
        (2, 6, [50, 51], 2, [(0, 1, False), (1, 1, True)]),
        (8, 0, [50, 51], 3, [(0, 2, False), (2, 1, True)]),
    ],
)
async def test_a_decode_worker_with_pages_of_another_size(rig, page_size, prefix, pages, source, chunks):
    message = request(rig, prefix=prefix, pages=pages)
    message.inbox.layout.page_size = page_size
    call = rig.stub.Run(message)
    await rig.engine.begun(0)
    transfer = await rig.agent.opened_transfer()
    opened = rig.agent.transfers[transfer]
    assert (len(opened.source_pages), opened.prefix_tokens) == (source, prefix)
    for step in range(2):
        await rig.engine.begun(step)
        rig.engine.finish()
    await until(lambda: len(rig.agent.steps) == 2)
    assert [(c.first_page, c.pages, c.last) for step in rig.agent.steps for c in step.chunks] == chunks
    rig.agent.finish(transfer)
    await call
    await rig.idle()


@pytest.mark.parametrize(("tokens", "prefix"), [(1, 0), (5, 4), (4, 4), (9, 8)])
async def test_nothing_to_transfer_is_nothing_to_do(rig, tokens, prefix):
    assert await rig.stub.Run(request(rig, tokens, prefix)) == prefill_pb2.RunResponse()
    assert not rig.agent.calls["OpenTransfer"] and not rig.engine.plans


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "INVALID_REQUEST"),
        ({"tokens": 129}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"prefix": 3}, "INVALID_REQUEST"),
        ({"prefix": 12}, "INVALID_REQUEST"),
        ({"pages": [1, 2]}, "INVALID_REQUEST"),
        ({"pages": [1, 2, 3, 4]}, "INVALID_REQUEST"),
    ],
)
async def test_what_can_never_be_served_is_refused(rig, changes, reason):
    error = await failure(rig.stub.Run(request(rig, **changes)))
    assert (error.status, error.reason) == ("INVALID_ARGUMENT", reason)
    assert outcomes(rig) == {reason.lower(): 1}
    await rig.idle()


async def test_a_token_outside_the_vocabulary_is_refused(rig):
    message = request(rig)
    message.prompt_token_ids[3] = 100
    error = await failure(rig.stub.Run(message))
    assert error.fields == {"token_id": "100"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 3), ("page_size", 6), ("kv_heads", 1), ("head_dim", 8), ("dtype", "bfloat16"), ("order", 2)],
)
async def test_another_layout_is_refused(rig, field, value):
    message = request(rig)
    setattr(message.inbox.layout, field, value)
    error = await failure(rig.stub.Run(message))
    assert (error.status, error.reason) == ("FAILED_PRECONDITION", "INCOMPATIBLE_WORKER")


async def test_more_than_the_pool_holds_is_refused(rig):
    error = await failure(rig.stub.Run(request(rig, tokens=80)))
    assert error.reason == "EXCEEDS_PAGE_POOL"


async def test_cancelled_while_it_waits_for_pages(rig):
    await rig.host.reserver.reserve("other", 16, None)
    call = rig.stub.Run(request(rig))
    await until(lambda: rig.host.reserver.waiting)
    call.cancel()
    await until(lambda: not rig.host.reserver.waiting)
    rig.host.reserver.release("other")
    await rig.idle()
    assert outcomes(rig) == {"cancelled": 1} and not rig.agent.calls["OpenTransfer"]


async def test_cancelled_while_the_transfer_is_being_opened(rig):
    gate = rig.agent.after["OpenTransfer"] = Gate()
    call = rig.stub.Run(request(rig))
    await gate.entered.wait()
    call.cancel()
    await rig.idle()
    gate.open()
    await until(lambda: rig.agent.cancelled)
    assert not rig.engine.plans


async def test_cancelled_in_the_queue(rig):
    first = rig.stub.Run(request(rig, tokens=20))
    await rig.engine.begun(0)
    second = rig.stub.Run(request(rig))
    await until(lambda: rig.host.actor.scheduler.waiting)
    second.cancel()
    await until(lambda: len(rig.agent.cancelled) == 1)
    assert not rig.host.actor.scheduler.waiting
    first.cancel()
    await until(lambda: len(rig.agent.cancelled) == 2)
    rig.engine.finish()
    await rig.idle()
    assert len(rig.engine.plans) == 1


async def test_cancelled_in_a_step_the_pages_stay_until_the_step_and_the_transfer_have_ended(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    gate = rig.agent.before["CancelTransfer"] = Gate()
    call.cancel()
    await gate.entered.wait()
    held = rig.pool.total - rig.pool.free
    rig.engine.finish()
    await until(lambda: rig.host.actor.steps_done == 1)
    await settle()
    assert rig.pool.total - rig.pool.free == held == 3  # a write may still read them
    gate.open()
    await rig.idle()
    assert len(rig.agent.cancelled) == 1 and not rig.sender._outgoing


async def test_cancelled_after_the_last_step(rig):
    call = rig.stub.Run(request(rig, tokens=5))
    await rig.engine.begun(0)
    rig.engine.finish()
    await until(lambda: rig.host.actor.steps_done == 1)
    call.cancel()
    await rig.idle()
    assert len(rig.agent.cancelled) == 1


async def test_a_transfer_that_fails_stops_the_computation(rig):
    call = rig.stub.Run(request(rig, tokens=20))
    await rig.engine.begun(0)
    rig.agent.fail_transfer(await rig.agent.opened_transfer(), "PEER_FAILED")
    error = await failure(call)
    assert (error.status, error.reason, error.fields["cause"]) == ("UNAVAILABLE", "TRANSFER_FAILED", "PEER_FAILED")
    rig.engine.finish()
    await rig.idle()
    assert len(rig.engine.plans) == 1 and rig.agent.cancelled == []


async def test_the_agents_refusal_is_no_fault_of_the_request(rig):
    rig.agent.before["OpenTransfer"] = refuse("INVALID_ARGUMENT", "INVALID_FIELD")
    error = await failure(rig.stub.Run(request(rig)))
    assert (error.status, error.reason, error.fields["cause"]) == ("UNAVAILABLE", "TRANSFER_FAILED", "INVALID_FIELD")
    await rig.idle()


async def test_without_an_agent_nothing_is_computed(rig, monkeypatch):
    monkeypatch.setattr(module, "AGENT_WAIT_S", 0.01)
    session = await rig.host.link.session(1)
    await rig.agent.stop()
    rig.engine.attach_failures = 1000
    rig.engine.lose_agent()
    await session.lost
    error = await failure(rig.stub.Run(request(rig)))
    assert (error.status, error.reason) == ("UNAVAILABLE", "AGENT_UNAVAILABLE")
    await rig.idle()


async def test_an_agent_that_is_lost_ends_the_transfer(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    rig.agent.end(rig.engine.attached[0])
    error = await failure(call)
    assert error.reason == "TRANSFER_FAILED" and "agent lost" in error.message
    rig.engine.finish()
    await rig.idle()


async def test_a_step_that_the_agent_was_not_told_of_breaks_the_transfer(rig):
    rig.agent.before["SubmitStep"] = refuse("UNAVAILABLE")
    call = rig.stub.Run(request(rig, tokens=20))
    await rig.engine.begun(0)
    error = await failure(call)
    assert error.reason == "TRANSFER_FAILED"
    rig.engine.finish()
    await rig.idle()
    assert len(rig.agent.cancelled) == 1


async def test_after_a_failed_step_no_other_begins_before_its_transfers_are_cancelled(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    other = rig.stub.Run(request(rig, tokens=5))
    await until(lambda: rig.host.actor.scheduler.waiting)
    gate = rig.agent.before["CancelTransfer"] = Gate()
    rig.engine.fail()
    error = await failure(call)
    assert error.status in ("UNAVAILABLE", "INTERNAL")
    await gate.entered.wait()
    await settle()
    assert len(rig.engine.plans) == 1
    gate.open()
    await rig.engine.begun(1)
    assert len(rig.agent.cancelled) >= 1
    (survivor,) = rig.agent.transfers
    rig.engine.finish()
    rig.agent.finish(survivor)
    await other
    await rig.idle()


async def test_a_failed_step_waits_for_a_transfer_whose_caller_has_left_too(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    other = rig.stub.Run(request(rig, tokens=5))
    await until(lambda: rig.host.actor.scheduler.waiting)
    gate = rig.agent.before["CancelTransfer"] = Gate()
    call.cancel()
    await gate.entered.wait()
    rig.engine.fail()
    await until(lambda: rig.agent.calls["CancelTransfer"] == 2)
    await settle()
    assert len(rig.engine.plans) == 1
    gate.open()
    await rig.engine.begun(1)
    other.cancel()
    rig.engine.finish()
    await rig.idle()


async def test_a_failed_step_does_not_wait_for_a_transfer_that_the_agent_forgot(rig):
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    rig.agent.before["CancelTransfer"] = refuse("NOT_FOUND", "UNKNOWN_TRANSFER")
    rig.engine.fail()
    await failure(call)
    await rig.idle()
    again = rig.stub.Run(request(rig, tokens=5))
    await rig.engine.begun(1)
    again.cancel()
    rig.engine.finish()
    await rig.idle()


async def test_stopping_the_engine_while_a_failed_step_waits_leaves_the_session_intact(rig):
    """The wait for the session's end must not be what ends it."""
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    session = rig.host.link.current
    rig.agent.before["CancelTransfer"] = refuse("UNAVAILABLE")
    rig.engine.fail()
    await failure(call)
    await until(lambda: rig.agent.calls["CancelTransfer"] >= 2)
    await rig.host.actor.stop()
    assert not session.lost.cancelled()


async def test_pages_that_a_silent_agent_may_read_are_in_quarantine_until_it_answers(rig, monkeypatch):
    monkeypatch.setattr(letting_go, "QUARANTINE_AFTER_S", 0.01)
    call = rig.stub.Run(request(rig))
    await rig.engine.begun(0)
    gate = rig.agent.before["CancelTransfer"] = Gate()
    call.cancel()
    await gate.entered.wait()
    rig.engine.finish()
    await until(lambda: rig.pool.quarantined == 3)
    sample = rig.metrics.quarantined_pages.labels(reason="cancelling_transfer")
    assert next(iter(sample.collect())).samples[0].value == 3
    gate.open()
    await rig.idle()
    assert rig.pool.quarantined == 0


async def test_a_dead_engine_fails_what_runs_and_what_waits(rig):
    message = request(rig)
    running = rig.stub.Run(message)
    await rig.engine.begun(0)
    reserver = rig.host.reserver
    await reserver.reserve("other", reserver.pool.free, None)
    waiting = rig.stub.Run(message)
    await until(lambda: reserver.waiting)
    joining = asyncio.create_task(rig.worker.engines.join())
    rig.engine.die()
    for call in (running, waiting):
        error = await failure(call)
        assert (error.status, error.reason) == ("UNAVAILABLE", "ENGINE_UNAVAILABLE")
    with pytest.raises(Exception, match="SIGKILL"):
        await joining
    error = await failure(rig.stub.Run(message))
    assert error.reason == "ENGINE_UNAVAILABLE"
