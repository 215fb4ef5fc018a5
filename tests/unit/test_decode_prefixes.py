"""A decode worker's prefix cache: what is asked of prefill workers, what is kept, and what is not."""

import asyncio

import grpc
import pytest
from baton.v1 import common_pb2

from conditions import settle, until
from decode_rig import decode_rig, generate_request
from fake_agent import Gate

PAGE = 4


@pytest.fixture
def section(request):
    return getattr(request, "param", {})


@pytest.fixture
async def rig(monkeypatch, tmp_path, section):
    async with decode_rig(monkeypatch, tmp_path, **section) as rig:
        yield rig


def prompt_of(rig, token_ids, salt="", **options):
    message = generate_request(rig, **options)
    del message.prompt_token_ids[:]
    message.prompt_token_ids.extend(token_ids)
    message.cache_salt = salt
    return message


async def generate(rig, token_ids, **options):
    """The last message; a prefill worker is there that fills at once."""
    if rig.prefill is not None:
        rig.prefill.script = ["fill"]
    messages = [message async for message in rig.stub.Generate(prompt_of(rig, token_ids, **options))]
    if rig.prefill is not None:
        rig.prefill.script = []
    await rig.idle()
    return messages[-1]


def cache(rig):
    values = {}
    for family in rig.metrics.registry.collect():
        for sample in family.samples:
            if "prefix_cache" in sample.name or sample.name == "baton_decode_cached_pages":
                values[sample.name.removeprefix("baton_decode_")] = sample.value
    return values


@pytest.mark.parametrize(
    ("tokens", "asked"),
    [
        (3 * PAGE, (8, 1)),  # the third page is full but for the last token, which is to be run again
        (3 * PAGE + 1, None),
        (3 * PAGE + 2, (12, 1)),
        (PAGE, (0, 1)),
        (PAGE + 1, None),
        (1, None),
    ],
)
async def test_only_the_pages_that_are_not_here_are_asked_for(rig, tokens, asked):
    prompt = [t % 90 for t in range(tokens)]
    await generate(rig, prompt, max_tokens=1)
    rig.prefill.runs.clear()
    steps = len(rig.engine.plans)
    await generate(rig, prompt, max_tokens=1)
    assert [(run.request.prefix_tokens, len(run.request.pages)) for run in rig.prefill.runs] == (
        [asked] if asked else []
    )
    (item,) = rig.engine.plans[steps].items
    assert (item.start, item.token_ids, item.sample) == (tokens - 1, (prompt[-1],), True)


async def test_a_full_hit_calls_nobody_and_says_so(rig):
    prompt = list(range(9))
    first = await generate(rig, prompt, max_tokens=1)
    assert first.usage.cached_tokens == first.timeline.decode_cached_tokens == 0
    rig.prefill.runs.clear()
    opened = rig.agent.calls["OpenInbox"]
    second = await generate(rig, prompt, max_tokens=1, workers=[])
    assert not rig.prefill.runs and rig.agent.calls["OpenInbox"] == opened
    assert second.usage.cached_tokens == second.timeline.decode_cached_tokens == 8
    assert second.timeline.prefill_worker == "" and not second.timeline.local_prefill


async def test_the_next_turn_of_a_chat_finds_prompt_and_answer(rig):
    prompt = list(range(10))
    await generate(rig, prompt, max_tokens=8)  # 10 and 8 tokens drawn, the last of which was never written
    rig.prefill.runs.clear()
    await generate(rig, [*prompt, *[1] * 8, 50, 51, 52], max_tokens=1)
    (run,) = rig.prefill.runs
    assert (run.request.prefix_tokens, len(run.request.pages)) == (16, 1)


async def test_a_token_that_was_drawn_but_not_written_is_not_offered(rig):
    prompt = list(range(10))
    await generate(rig, prompt, max_tokens=6)  # 16 tokens, of which 15 are written
    rig.prefill.runs.clear()
    await generate(rig, [*prompt, *[1] * 6, 50], max_tokens=1)
    assert [run.request.prefix_tokens for run in rig.prefill.runs] == [12]


async def test_what_the_next_token_is_written_into_is_nobody_elses(rig):
    """With shared pages in every request that runs."""
    prompt = list(range(8))
    await generate(rig, prompt, max_tokens=1)
    rig.engine.automatic = False
    rig.prefill.script = ["fill"] * 3
    calls = [asyncio.create_task(anext(aiter(rig.stub.Generate(prompt_of(rig, prompt, max_tokens=9))))) for _ in "abc"]
    await until(lambda: rig.host.actor.scheduler.running + rig.host.actor.scheduler.waiting == 3)
    tables = []
    while len(tables) < 3:
        await until(lambda: rig.engine.running)
        tables += [start.pages for start in rig.engine.plans[-1].starts]
        rig.engine.finish()
        await settle()
    assert {table[0] for table in tables} == {0}, "one page is shared"
    written = [page for table in tables for page in table[(len(prompt) - 1) // PAGE :]]
    assert len(set(written)) == len(written) and 0 not in written
    for call in calls:
        call.cancel()
    rig.engine.automatic = True
    if rig.engine.running:
        rig.engine.finish()
    await rig.idle()


async def test_another_salt_shares_nothing(rig):
    prompt = list(range(9))
    await generate(rig, prompt, salt="a")
    rig.prefill.runs.clear()
    await generate(rig, prompt, salt="b")
    await generate(rig, prompt, salt="a")
    assert [(run.request.prefix_tokens, run.request.cache_salt) for run in rig.prefill.runs] == [(0, "b")]


@pytest.mark.parametrize("section", [{"prefix_cache": False}], indirect=True)
async def test_switched_off_nothing_is_kept(rig):
    prompt = list(range(9))
    await generate(rig, prompt)
    rig.prefill.runs.clear()
    last = await generate(rig, prompt)
    assert [run.request.prefix_tokens for run in rig.prefill.runs] == [0]
    assert last.usage.cached_tokens == 0 and cache(rig)["cached_pages"] == 0


async def test_a_prefix_that_never_fully_arrived_is_not_offered(rig):
    prompt = list(range(10))
    call = rig.stub.Generate(prompt_of(rig, prompt))
    await rig.prefill.run(0)
    call.cancel()
    await rig.idle()
    assert rig.pool.kept == 0
    rig.prefill.script = ["UNAVAILABLE", "UNAVAILABLE"]
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in rig.stub.Generate(prompt_of(rig, prompt)):
            pass
    await rig.idle()
    assert rig.pool.kept == 0


async def test_nothing_of_a_prompt_whose_inbox_is_being_closed_is_offered(rig):
    gate = rig.agent.before["CloseInbox"] = Gate()
    prompt = list(range(10))
    call = rig.stub.Generate(prompt_of(rig, prompt))
    await rig.prefill.run(0)
    call.cancel()
    await gate.entered.wait()
    rig.prefill.script = ["fill"]
    other = [message async for message in rig.stub.Generate(prompt_of(rig, prompt))]
    assert other[-1].timeline.decode_cached_tokens == 0
    gate.open()
    await rig.idle()


async def test_a_failed_step_leaves_nothing_of_its_sequences(rig):
    prompt = list(range(10))
    await generate(rig, prompt, max_tokens=1)
    assert rig.pool.kept == 2
    rig.engine.automatic = False
    rig.prefill.script = ["fill"]
    step = len(rig.engine.plans)
    call = asyncio.create_task(anext(aiter(rig.stub.Generate(prompt_of(rig, prompt)))))
    await until(lambda: len(rig.engine.plans) > step and rig.engine.running)
    rig.engine.fail()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await rig.idle()
    assert rig.pool.kept == 0


async def test_an_answer_that_its_client_breaks_off_is_kept_as_far_as_it_is_written(rig):
    """So does every answer end that meets a stop string: the gateway leaves."""
    rig.engine.automatic = False
    rig.prefill.script = ["fill"]
    call = rig.stub.Generate(prompt_of(rig, list(range(10)), max_tokens=20))
    for step in range(3):
        await rig.engine.begun(step)
        rig.engine.finish()
        await call.read()
    await rig.engine.begun(3)
    call.cancel()
    await until(lambda: any(live.in_step and live.cancelled for live in rig.host.actor.scheduler._all.values()))
    rig.engine.finish()
    await rig.idle()
    assert rig.pool.kept == 3  # 10 tokens and the first two drawn


async def test_two_identical_prompts_at_once_are_kept_once_and_freed_once(rig):
    rig.engine.automatic = False
    prompt = list(range(9))
    calls = [rig.stub.Generate(prompt_of(rig, prompt, max_tokens=1)) for _ in range(2)]
    runs = [await rig.prefill.run(number) for number in range(2)]
    assert not set(runs[0].request.pages) & set(runs[1].request.pages)
    for run in runs:
        rig.agent.fill(run.key)
        run.succeed()
    rig.engine.automatic = True
    for call in calls:
        reading = asyncio.create_task(call.read())
        await until(lambda reading=reading: reading.done() or rig.engine.running)
        if rig.engine.running:
            rig.engine.finish()
        assert (await reading).token_ids
        assert (await call.read()).finish_reason == common_pb2.FINISH_REASON_LENGTH
    await rig.idle()
    assert (rig.pool.kept, rig.pool.free) == (2, 16)


async def test_the_prefill_workers_hits_are_the_usages(rig):
    """What the decode worker has need not be transferred; but only what the prefill worker has is not computed."""
    await generate(rig, list(range(9)))
    call = rig.stub.Generate(prompt_of(rig, list(range(20)), max_tokens=2))
    number = len(rig.prefill.runs)
    run = await rig.prefill.run(number)
    run.succeed(cached_tokens=4)
    rig.agent.fill(run.key)
    last = [message async for message in call][-1]
    assert last.usage.cached_tokens == last.timeline.prefill_cached_tokens == 4
    assert last.timeline.decode_cached_tokens == 8
    await rig.idle()


async def test_the_first_tokens_usage_knows_the_prefill_workers_hits_if_they_come_soon(rig, monkeypatch):
    """A stop string may end the answer there, and what was told so far is what the client gets."""
    monkeypatch.setattr("baton_decode.servicer.FIRST_ACCOUNT_WAIT_S", 5.0)
    call = rig.stub.Generate(prompt_of(rig, list(range(20)), max_tokens=2))
    run = await rig.prefill.run()
    rig.agent.fill(run.key)
    reading = asyncio.create_task(call.read())
    await until(lambda: rig.engine.plans, "the first step")
    await settle()
    assert not reading.done()
    run.succeed(cached_tokens=12)
    assert (await reading).usage.cached_tokens == 12
    assert (await call.read()).token_ids
    assert (await call.read()).usage.cached_tokens == 12
    await rig.idle()


async def test_the_first_token_does_not_wait_for_an_account_that_does_not_come(rig):
    call = rig.stub.Generate(prompt_of(rig, list(range(20)), max_tokens=2))
    run = await rig.prefill.run()
    rig.agent.fill(run.key)
    assert (await call.read()).token_ids
    assert not run.answer.done()
    run.succeed()
    assert (await call.read()).token_ids
    await rig.idle()


@pytest.mark.parametrize("section", [{"policy": "fallback"}, {"policy": "always"}], indirect=True)
async def test_a_prompt_computed_here_begins_where_the_cached_prefix_ends(rig):
    options = {"workers": []}
    await generate(rig, list(range(9)), **options)
    last = await generate(rig, list(range(20)), **options)
    assert last.timeline.local_prefill and last.usage.cached_tokens == 8
    assert sum(chunk.tokens for chunk in last.timeline.chunks) == 12
    again = await generate(rig, list(range(17)), **options)
    assert not again.timeline.local_prefill and again.usage.cached_tokens == 16


async def test_under_pressure_the_oldest_prefix_makes_room(rig):
    for first in (10, 20, 30):
        await generate(rig, [first] * 25, max_tokens=1)  # 7 pages of 16, of which 6 are kept
    # The third gets 7 neighbours: all of the first prompt's, and the end of the second one's.
    assert cache(rig) == {
        "cached_pages": 8,
        "prefix_cache_queries_total": 72,
        "prefix_cache_hits_total": 0,
        "prefix_cache_evictions_total": 10,
    }
    rig.prefill.runs.clear()
    for first in (30, 20):
        await generate(rig, [first] * 25, max_tokens=1)
    assert [run.request.prefix_tokens for run in rig.prefill.runs] == [8]
    assert cache(rig)["prefix_cache_hits_total"] == 24 + 8


async def test_a_request_that_waits_uses_what_is_there_when_its_turn_comes(rig):
    prompt = list(range(9))
    await rig.host.reserver.reserve("other", 14, None)
    rig.engine.automatic = False
    rig.prefill.script = ["fill"]
    first = rig.stub.Generate(prompt_of(rig, [1], max_tokens=1))
    await rig.engine.begun(0)
    waiting = rig.stub.Generate(prompt_of(rig, prompt, max_tokens=1))
    await until(lambda: rig.host.reserver.waiting)
    chain = rig.host.chain(prompt)
    rig.host.reserver.keep(chain, rig.pool.pages_of("other"), 8)
    rig.engine.automatic = True
    rig.engine.finish()
    assert (await waiting.read()).token_ids and not rig.prefill.runs
    waiting.cancel()
    assert (await first.read()).token_ids
    rig.host.reserver.release("other")
    await rig.idle()
