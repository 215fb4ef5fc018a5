import asyncio

import pytest
from baton.v1 import agent_pb2, common_pb2, decode_pb2, registry_pb2

from baton_actors import Deadline, DeadlineExceeded
from baton_decode import receiver as module
from baton_decode.receiver import KvReceiver
from baton_rpc import RemoteError
from baton_telemetry.metrics import DecodeMetrics
from baton_worker import letting_go
from baton_worker.engine_actor import NoHooks
from baton_worker.errors import PrefillUnavailable
from conditions import settle, until
from fake_agent import Gate, refuse
from fake_prefill import FakePrefill
from worker_rig import worker_rig

NEVER = Deadline.never()
TOKENS = 10  # 9 to be prefilled: 3 pages of 4


@pytest.fixture
async def rig(monkeypatch, tmp_path):
    metrics = DecodeMetrics()
    async with worker_rig(
        monkeypatch,
        tmp_path,
        registry_pb2.WORKER_ROLE_DECODE,
        metrics,
        NoHooks(),
        lambda worker: None,
        section={"prefill_attempts": 2},
    ) as rig:
        rig.metrics = metrics
        rig.receiver = KvReceiver(rig.worker, rig.worker.section, metrics)
        rig.prefills = [await FakePrefill(f"p{number}", rig.agent).start() for number in range(2)]
        yield rig
        for prefill in rig.prefills:
            await prefill.stop()


def request(rig, candidates=None, **changes):
    workers = [prefill.info(rig.layout) for prefill in rig.prefills] if candidates is None else candidates
    return decode_pb2.DecodeGenerateRequest(
        request_id="r", prompt_token_ids=range(TOKENS), prefill_workers=workers, **changes
    )


async def fetch(rig, message=None, prefix=0, deadline=NEVER):
    """What the servicer does around it."""
    pages = (await rig.host.reserver.reserve("request", 4, None)).pages
    try:
        return await rig.receiver.fetch(rig.host, message or request(rig), pages, prefix, deadline)
    finally:
        rig.host.reserver.release("request")


def start(rig, *arguments, **options):
    return asyncio.create_task(fetch(rig, *arguments, **options))


def attempts(rig):
    (family,) = rig.metrics.prefill_attempts.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


async def nothing_is_left(rig):
    await rig.idle()
    await until(lambda: not rig.agent.inboxes, "nothing open at the agent")


async def test_the_pages_are_there_when_the_inbox_is_full(rig):
    fetching = start(rig)
    run = await rig.prefills[0].run()
    inbox = rig.agent.inboxes[run.key]
    assert list(run.request.pages) == [0, 1, 2] and list(run.request.prompt_token_ids) == list(range(TOKENS))
    assert inbox.expected_extents == 2 * 3  # layers times pages, one extent each
    assert inbox.sender == rig.prefills[0].info(rig.layout).agent
    assert not fetching.done()
    rig.agent.fill(run.key)
    received = await fetching
    assert (received.worker_id, received.retries) == ("p0", 0) and received.inbox_us > 0
    assert not received.run.done()
    run.succeed(queue_us=5)
    assert (await received.run).queue_us == 5
    await nothing_is_left(rig)
    assert rig.agent.closed == [run.key] and attempts(rig) == {"ok": 1}


@pytest.mark.parametrize(("page_size", "smaller"), [(2, 2), (8, 4)])
async def test_a_prefill_worker_with_pages_of_another_size(rig, page_size, smaller):
    worker = rig.prefills[0].info(rig.layout)
    worker.layout.page_size = page_size
    fetching = start(rig, request(rig, [worker]))
    run = await rig.prefills[0].run()
    assert list(run.request.pages) == [0, 1, 2]
    # Two layers, and of each smaller page the keys and values of two heads.
    assert rig.agent.inboxes[run.key].expected_extents == 2 * 4 * -(-(TOKENS - 1) // smaller)
    rig.agent.fill(run.key)
    run.succeed()
    await fetching
    await nothing_is_left(rig)


@pytest.mark.parametrize(("page_size", "tokens"), [(2, 6), (4, 8), (8, 8)])
async def test_with_a_checksum_the_agent_hears_what_to_check_and_a_mismatch_is_tried_again(rig, page_size, tokens):
    rig.receiver = KvReceiver(rig.worker, rig.worker.section.model_copy(update={"checksum": "crc32c"}), rig.metrics)
    workers = [prefill.info(rig.layout) for prefill in rig.prefills]
    for worker in workers:
        worker.layout.page_size = page_size
    fetching = start(rig, request(rig, workers), prefix=4)
    run = await rig.prefills[0].run()
    inbox = rig.agent.inboxes[run.key]
    assert inbox.checksum == agent_pb2.CHECKSUM_CRC32C
    assert (list(inbox.pages), inbox.tokens) == (list(run.request.pages), tokens)
    rig.agent.fail_inbox(run.key, "CHECKSUM_MISMATCH")
    again = await rig.prefills[1].run()
    assert again.request.pages == run.request.pages and again.key != run.key
    rig.agent.fill(again.key)
    again.succeed()
    assert (await fetching).worker_id == "p1"
    await nothing_is_left(rig)


async def test_without_a_checksum_the_agent_checks_nothing(rig):
    fetching = start(rig)
    run = await rig.prefills[0].run()
    assert not rig.agent.inboxes[run.key].checksum and not rig.agent.inboxes[run.key].pages
    rig.agent.fill(run.key)
    run.succeed()
    await fetching
    await nothing_is_left(rig)


async def test_a_prefix_that_is_here_is_left_out(rig):
    fetching = start(rig, prefix=4)
    run = await rig.prefills[0].run()
    assert list(run.request.pages) == [1, 2] and run.request.prefix_tokens == 4
    rig.agent.fill(run.key)
    run.succeed()
    await fetching
    await nothing_is_left(rig)


async def test_the_inbox_may_be_full_a_little_after_the_call_has_ended(rig):
    fetching = start(rig)
    run = await rig.prefills[0].run()
    run.succeed()
    await until(lambda: len(rig.worker.background) == 0, "the call's end")
    assert not fetching.done()
    rig.agent.fill(run.key)
    assert (await fetching).retries == 0
    await nothing_is_left(rig)


async def test_a_call_that_fails_after_the_inbox_was_full_changes_nothing(rig):
    fetching = start(rig)
    run = await rig.prefills[0].run()
    rig.agent.fill(run.key)
    received = await fetching
    run.fail("UNAVAILABLE")
    assert isinstance(await received.run, RemoteError)
    await nothing_is_left(rig)


@pytest.mark.parametrize("how", ["call", "inbox", "inbox not quiesced", "never full"])
async def test_the_next_worker_gets_the_same_pages_only_when_nothing_can_write_them(rig, monkeypatch, how):
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    closing = rig.agent.before["CloseInbox"] = Gate()
    fetching = start(rig)
    run = await rig.prefills[0].run()
    match how:
        case "call":
            run.fail("UNAVAILABLE")
        case "never full":
            run.succeed()
        case _:
            rig.agent.fail_inbox(run.key, quiesced=how == "inbox")
    await closing.entered.wait()
    await settle()
    assert not rig.prefills[1].runs and rig.agent.calls["OpenInbox"] == 1
    assert len(rig.pool.owners) == 2
    closing.open()
    again = await rig.prefills[1].run()
    assert again.request.pages == run.request.pages and again.key != run.key
    assert run.cancelled or how in ("call", "never full")
    rig.agent.fill(again.key)
    again.succeed()
    received = await fetching
    assert (received.worker_id, received.retries) == ("p1", 1)
    await nothing_is_left(rig)
    assert [rig.metrics.transfers.labels(outcome=end)._value.get() for end in ("failed", "done")] == [1, 1]


async def test_a_late_event_of_the_first_inbox_does_not_fill_the_second(rig):
    fetching = start(rig)
    run = await rig.prefills[0].run()
    first = rig.agent.inboxes[run.key]
    run.fail("UNAVAILABLE")
    again = await rig.prefills[1].run()
    rig.agent.inboxes[run.key] = first
    rig.agent.fill(run.key)
    del rig.agent.inboxes[run.key]
    await settle()
    assert not fetching.done()
    rig.agent.fill(again.key)
    again.succeed()
    await fetching
    await nothing_is_left(rig)


async def test_a_silent_prefill_worker_is_given_up(rig):
    rig.receiver._settings = rig.worker.section.model_copy(update={"prefill_timeout_s": 0.05})
    with pytest.raises(PrefillUnavailable) as caught:
        await fetch(rig)
    assert caught.value.fields["attempts"] == "2"
    await until(lambda: all(prefill.runs[0].cancelled for prefill in rig.prefills), "both calls cancelled")
    await nothing_is_left(rig)


async def test_a_prefill_worker_that_is_not_there(rig):
    await rig.prefills[0].stop()
    rig.prefills[1].script = ["fill"]
    assert (await fetch(rig)).worker_id == "p1"
    await nothing_is_left(rig)


async def test_the_only_worker_is_tried_again(rig):
    rig.prefills[0].script = ["UNAVAILABLE", "fill"]
    received = await fetch(rig, request(rig, [rig.prefills[0].info(rig.layout)]))
    assert received.retries == 1
    await nothing_is_left(rig)


async def test_when_all_attempts_fail_the_last_cause_is_told(rig):
    rig.prefills[0].script = ["UNAVAILABLE"]
    rig.prefills[1].script = ["INTERNAL"]
    with pytest.raises(PrefillUnavailable, match="2 attempts") as caught:
        await fetch(rig)
    assert caught.value.fields["cause"] == "TEST" and attempts(rig) == {"test": 2}
    await nothing_is_left(rig)


async def test_what_no_worker_would_take_is_not_tried_again(rig):
    rig.prefills[0].script = ["INVALID_ARGUMENT"]
    with pytest.raises(RemoteError) as caught:
        await fetch(rig)
    assert caught.value.status == "INVALID_ARGUMENT" and not rig.prefills[1].runs
    await nothing_is_left(rig)


async def test_want_of_room_is_told_if_no_other_worker_has_any(rig):
    for prefill in rig.prefills:
        prefill.script = ["RESOURCE_EXHAUSTED"]
    with pytest.raises(RemoteError) as caught:
        await fetch(rig)
    assert caught.value.status == "RESOURCE_EXHAUSTED" and len(rig.prefills[1].runs) == 1
    await nothing_is_left(rig)


async def test_a_prompt_too_large_for_one_workers_pool_may_fit_anothers(rig):
    rig.prefills[0].script = ["INVALID_ARGUMENT EXCEEDS_PAGE_POOL"]
    rig.prefills[1].script = ["fill"]
    assert (await fetch(rig)).worker_id == "p1"
    for prefill in rig.prefills:
        prefill.script = ["INVALID_ARGUMENT EXCEEDS_PAGE_POOL"]
    with pytest.raises(RemoteError) as caught:
        await fetch(rig)
    assert caught.value.reason == "EXCEEDS_PAGE_POOL"
    await nothing_is_left(rig)


async def test_after_the_requests_deadline_no_other_worker_is_tried(rig):
    with pytest.raises(DeadlineExceeded):
        await fetch(rig, deadline=Deadline.after(0.05))
    assert rig.prefills[0].runs[0].time_left < 0.5 and not rig.prefills[1].runs
    await nothing_is_left(rig)


async def test_workers_that_do_not_fit_are_passed_over(rig):
    good = rig.prefills[1].info(rig.layout)
    good.layout.pages = 9999  # its own affair
    other_weights = rig.prefills[0].info(rig.layout, fingerprint="beef")
    other_layout = rig.prefills[0].info(rig.layout)
    other_layout.layout.page_size = 6  # neither divides the other
    no_agent = rig.prefills[0].info(rig.layout)
    no_agent.ClearField("agent")
    rig.prefills[1].script = ["fill"]
    received = await fetch(rig, request(rig, [other_weights, other_layout, no_agent, good]))
    assert (received.worker_id, received.retries) == ("p1", 0)
    await nothing_is_left(rig)
    with pytest.raises(PrefillUnavailable) as caught:
        await fetch(rig, request(rig, [other_weights, other_layout, no_agent]))
    assert caught.value.fields["offered"] == "3"
    with pytest.raises(PrefillUnavailable):
        await fetch(rig, request(rig, []))
    assert not rig.prefills[0].runs


@pytest.mark.parametrize("fault", ["address", "sharding"])
async def test_a_worker_that_announces_nonsense_costs_one_attempt(rig, fault):
    odd, good = rig.prefills[0].info(rig.layout), rig.prefills[1].info(rig.layout)
    if fault == "address":
        odd.address = "nowhere"
    else:
        odd.sharding.CopyFrom(common_pb2.Sharding(tensor_parallel=3, data_parallel=1))  # of 2 heads
    rig.prefills[1].script = ["fill"]
    assert (await fetch(rig, request(rig, [odd, good]))).retries == 1
    await nothing_is_left(rig)


async def test_what_our_agent_refuses_is_no_fault_of_the_request(rig):
    rig.agent.before["OpenInbox"] = refuse("INVALID_ARGUMENT", "INVALID_FIELD")
    with pytest.raises(PrefillUnavailable) as caught:
        await fetch(rig)
    assert caught.value.status == "UNAVAILABLE"
    await nothing_is_left(rig)


async def test_a_client_that_leaves_has_its_call_cancelled_and_its_inbox_closed_first(rig):
    closing = rig.agent.before["CloseInbox"] = Gate()
    fetching = start(rig)
    run = await rig.prefills[0].run()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await closing.entered.wait()
    await until(lambda: run.cancelled, "the prefill worker hears of it")
    assert rig.pool.free == rig.pool.total - 3  # what the inbox covers, and no more
    closing.open()
    await nothing_is_left(rig)


@pytest.mark.parametrize("where", ["session", "before OpenInbox", "after OpenInbox", "before CloseInbox"])
async def test_a_client_that_leaves_at_any_wait(rig, where):
    gate = Gate()
    if where == "session":
        session = rig.host.link.current
        rig.engine.attach_failures = 10
        rig.agent.end(session.session)
        await session.lost
        fetching = start(rig)
        await settle()
    else:
        moment, call = where.split()
        getattr(rig.agent, moment)[call] = gate
        if call == "CloseInbox":
            rig.prefills[0].script = ["UNAVAILABLE"]
        fetching = start(rig)
        await gate.entered.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    gate.open()
    await nothing_is_left(rig)
    assert not rig.prefills[1].runs


async def test_a_client_that_leaves_at_any_moment(rig):
    """The first worker fails, the second serves: cancelled after ever more turns of the loop, till it is too late."""
    finished = turns = 0
    while finished < 3:
        turns += 3
        rig.prefills[0].script, rig.prefills[1].script = ["UNAVAILABLE"], ["fill"]
        fetching = start(rig)
        for _ in range(turns):
            await asyncio.sleep(0)
        fetching.cancel()
        (result,) = await asyncio.gather(fetching, return_exceptions=True)
        finished += not isinstance(result, BaseException)
        await nothing_is_left(rig)
    for prefill in rig.prefills:
        assert all(run.answer.done() or run.cancelled for run in prefill.runs)


async def test_an_agent_that_does_not_answer_leaves_the_pages_in_quarantine_until_it_does(rig, monkeypatch):
    monkeypatch.setattr(letting_go, "QUARANTINE_AFTER_S", 0.01)
    monkeypatch.setattr(letting_go, "LONGEST_DELAY_S", 0.01)
    rig.agent.before["CloseInbox"] = refuse("UNAVAILABLE", "FENCE_FAILED")
    fetching = start(rig)
    await rig.prefills[0].run()
    fetching.cancel()
    await until(lambda: rig.pool.quarantined == 3, "the quarantine")
    assert rig.pool.free == rig.pool.total - 3
    gauge = rig.metrics.quarantined_pages.labels(reason="closing_inbox")
    assert next(iter(gauge.collect())).samples[0].value == 3
    assert next(iter(rig.metrics.oldest_quarantine_seconds.collect())).samples[0].value > 0
    waiting = asyncio.create_task(rig.host.reserver.reserve("large", rig.pool.total, None))
    await settle()
    assert not waiting.done()
    del rig.agent.before["CloseInbox"]
    await waiting
    assert rig.pool.quarantined == 0
    rig.host.reserver.release("large")
    await nothing_is_left(rig)


async def test_a_call_that_hangs_at_the_agent_is_a_quarantine_too(rig, monkeypatch):
    monkeypatch.setattr(letting_go, "QUARANTINE_AFTER_S", 0.01)
    gate = rig.agent.before["CloseInbox"] = Gate()
    fetching = start(rig)
    await rig.prefills[0].run()
    fetching.cancel()
    await until(lambda: rig.pool.quarantined == 3, "the quarantine")
    gate.open()
    await nothing_is_left(rig)


async def test_the_loss_of_the_agent_ends_a_quarantine(rig, monkeypatch):
    monkeypatch.setattr(letting_go, "QUARANTINE_AFTER_S", 0.01)
    rig.agent.before["CloseInbox"] = refuse("UNAVAILABLE")
    fetching = start(rig)
    await rig.prefills[0].run()
    fetching.cancel()
    await until(lambda: rig.pool.quarantined == 3, "the quarantine")
    rig.agent.end(rig.host.link.current.session)
    await rig.idle()


async def test_the_loss_of_the_agent_while_waiting_is_another_attempt_through_the_next_session(rig):
    fetching = start(rig)
    await rig.prefills[0].run()
    session = rig.host.link.current
    rig.agent.inboxes.clear()
    rig.agent.end(session.session)
    again = await rig.prefills[1].run()
    rig.agent.fill(again.key)
    again.succeed()
    assert (await fetching).retries == 1
    await nothing_is_left(rig)


async def test_without_an_agent_there_is_no_prefill(rig, monkeypatch):
    monkeypatch.setattr(module, "AGENT_WAIT_S", 0.01)
    session = rig.host.link.current
    rig.engine.attach_failures = 1000
    rig.agent.end(session.session)
    await session.lost
    with pytest.raises(PrefillUnavailable) as caught:
        await fetch(rig)
    assert caught.value.fields["cause"] == "AGENT_UNAVAILABLE"
    await nothing_is_left(rig)
