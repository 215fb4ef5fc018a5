"""A prefill worker's prefix cache: what need not be computed is sent all the same."""

import asyncio

import grpc
import pytest

from conditions import settle, until
from fake_agent import Gate, refuse
from prefill_rig import prefill_rig, run_request


@pytest.fixture
async def rig(monkeypatch, tmp_path):
    async with prefill_rig(monkeypatch, tmp_path) as rig:
        yield rig


async def compute(rig, tokens, **options):
    """A prompt from its call to its answer; its chunk plans, as (step, [(first page, pages, last)])."""
    told = len(rig.agent.steps)
    opened = rig.agent.calls["OpenTransfer"]
    call = rig.stub.Run(run_request(rig, tokens, **options))
    await until(lambda: rig.agent.calls["OpenTransfer"] > opened and rig.agent.transfers)
    transfer = await rig.agent.opened_transfer()

    def complete():
        if rig.engine.running:
            rig.engine.finish()
        return any(chunk.last for step in rig.agent.steps[told:] for chunk in step.chunks)

    await until(complete, "the last chunk's plan")
    rig.agent.finish(transfer)
    await settle()
    if rig.engine.running:
        rig.engine.finish()
    response = await call
    await rig.idle()
    return response, plans(rig, told)


def plans(rig, first):
    return [(step.step, [(c.first_page, c.pages, c.last) for c in step.chunks]) for step in rig.agent.steps[first:]]


async def test_cached_pages_are_sent_after_a_step_that_is_done_and_only_the_rest_is_computed(rig):
    first, _ = await compute(rig, 10)  # steps 0 and 1
    assert first.cached_tokens == 0
    second, told = await compute(rig, 14)
    assert second.cached_tokens == 8
    assert told == [(1, [(0, 2, False)]), (2, [(2, 2, True)])]
    (item,) = rig.engine.plans[2].items
    assert (item.start, item.end) == (8, 13)
    assert [chunk.tokens for chunk in second.chunks] == [5]
    assert rig.worker._metrics.computed_prompt_tokens._value.get() == 9 + 5


@pytest.mark.parametrize(("tokens", "cached"), [(8, 4), (9, 8), (10, 8)])
async def test_a_page_is_cached_if_it_is_full_of_what_was_computed(rig, tokens, cached):
    """All prompt tokens but the last are: of 8 tokens the second page lacks one."""
    await compute(rig, tokens)
    again, _ = await compute(rig, tokens)
    assert again.cached_tokens == cached
    assert sum(chunk.tokens for chunk in again.chunks) == tokens - 1 - cached


async def test_a_prompt_that_is_wholly_cached_is_sent_without_a_step(rig):
    await compute(rig, 9)
    steps = len(rig.engine.plans)
    response, told = await compute(rig, 9)
    assert len(rig.engine.plans) == steps and told == [(steps - 1, [(0, 2, True)])]
    assert response.cached_tokens == 8 and not response.chunks


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        (4, [(1, [(0, 1, False)]), (2, [(1, 2, True)])]),
        (8, [(2, [(0, 2, True)])]),
        (12, [(2, [(0, 1, True)])]),
    ],
)
async def test_what_the_destination_has_is_not_sent_whether_it_is_cached_here_or_not(rig, prefix, told):
    await compute(rig, 10)
    response, chunks = await compute(rig, 14, prefix=prefix)
    assert response.cached_tokens == 8 and chunks == told


@pytest.mark.parametrize(
    ("page_size", "pages", "told"), [(2, 7, [(0, 4, False), (4, 3, True)]), (8, 2, [(0, 2, False), (2, 2, True)])]
)
async def test_plans_count_in_the_smaller_pages(rig, page_size, pages, told):
    await compute(rig, 10)
    message = run_request(rig, 14, pages=range(50, 50 + pages))
    message.inbox.layout.page_size = page_size
    known = len(rig.agent.steps)
    call = rig.stub.Run(message)
    await rig.engine.begun(2)
    rig.engine.finish()
    await until(lambda: len(rig.agent.steps) == known + 2)
    assert [chunk for _, chunks in plans(rig, known) for chunk in chunks] == told
    rig.agent.finish(await rig.agent.opened_transfer())
    assert (await call).cached_tokens == 8
    await rig.idle()


async def test_a_prompt_that_was_cancelled_or_failed_midway_is_not_offered(rig):
    call = rig.stub.Run(run_request(rig, 20))
    await rig.engine.begun(0)
    rig.engine.finish()
    await rig.engine.begun(1)
    call.cancel()
    await until(lambda: rig.agent.cancelled)
    rig.engine.finish()
    await rig.idle()
    assert rig.pool.kept == 0
    call = rig.stub.Run(run_request(rig, 20))
    await rig.engine.begun(2)
    rig.engine.finish()
    await rig.engine.begun(3)
    rig.engine.fail()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await rig.idle()
    assert rig.pool.kept == 0


async def test_a_failed_step_takes_back_what_its_prompts_shared(rig):
    await compute(rig, 10)
    call = rig.stub.Run(run_request(rig, 14))
    await rig.engine.begun(2)
    rig.engine.fail()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await rig.idle()
    assert rig.pool.kept == 0
    response, _ = await compute(rig, 14)
    assert response.cached_tokens == 0


async def test_after_a_failed_step_cached_pages_are_those_of_the_step_before(rig):
    """The counter stands somewhere in the failed step; what is cached was complete before."""
    await compute(rig, 10)  # steps 0, 1
    other = run_request(rig, 6)
    for position in range(6):
        other.prompt_token_ids[position] = 80
    call = rig.stub.Run(other)
    await rig.engine.begun(2)
    rig.engine.fail()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await rig.idle()
    _, told = await compute(rig, 9)
    assert told == [(1, [(0, 2, True)])]


async def test_a_transfer_that_fails_after_the_prompt_was_computed_leaves_a_prefix(rig):
    call = rig.stub.Run(run_request(rig, 9))
    await rig.engine.begun(0)
    transfer = await rig.agent.opened_transfer()
    rig.engine.finish()
    await until(lambda: rig.host.actor.steps_done == 1)
    rig.agent.fail_transfer(transfer)
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await rig.idle()
    response, _ = await compute(rig, 9)
    assert response.cached_tokens == 8


async def test_pages_that_a_transfer_may_read_are_not_given_away(rig):
    call = rig.stub.Run(run_request(rig, 9))
    await rig.engine.begun(0)
    gate = rig.agent.before["CancelTransfer"] = Gate()
    rig.engine.finish()
    await until(lambda: rig.host.actor.steps_done == 1)
    call.cancel()
    await gate.entered.wait()
    await until(lambda: rig.pool.owners == {("transfer", 1)})
    assert rig.pool.kept == 2 and rig.pool.free == 14
    await rig.host.reserver.reserve("other", 14, None)
    assert rig.pool.kept == 2 and rig.pool.free == 0
    gate.open()
    await until(lambda: rig.pool.free == 2)
    rig.host.reserver.release("other")
    await rig.idle()


async def test_who_shares_pages_with_a_transfer_that_goes_into_quarantine_sends_them_all_the_same(rig):
    await compute(rig, 9)
    kept = rig.pool.match(rig.host.chain([t % 90 for t in range(9)]).keys)
    rig.host.reserver.hold(kept, "another transfer")
    gate = rig.agent.before["OpenTransfer"] = Gate()
    call = asyncio.create_task(compute(rig, 9))
    await gate.entered.wait()
    rig.host.reserver.quarantine("another transfer", "cancelling_transfer")
    gate.open()
    await until(lambda: len(rig.agent.steps) == 2)
    rig.host.reserver.release_quarantine("another transfer")
    response, told = await call
    assert response.cached_tokens == 8 and told == [(0, [(0, 2, True)])]


async def test_a_transfer_that_is_refused_leaves_nothing_held(rig):
    await compute(rig, 9)
    rig.agent.before["OpenTransfer"] = refuse("RESOURCE_EXHAUSTED", "TOO_MANY_TRANSFERS")
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.stub.Run(run_request(rig, 9))
    await rig.idle()
    assert not rig.pool.owners


async def test_cancelled_while_only_cached_pages_are_on_their_way(rig):
    await compute(rig, 9)
    call = rig.stub.Run(run_request(rig, 9))
    await until(lambda: len(rig.agent.steps) == 2)
    call.cancel()
    await rig.idle()
    assert len(rig.agent.cancelled) == 1 and rig.pool.kept == 2


async def test_another_salt_is_computed_again(rig):
    await compute(rig, 9, cache_salt="a")
    assert (await compute(rig, 9, cache_salt="b"))[0].cached_tokens == 0
    assert (await compute(rig, 9, cache_salt="a"))[0].cached_tokens == 8
