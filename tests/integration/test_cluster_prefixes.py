"""The prefix cache through a whole cluster: what crosses the fabric, what is computed, and that no answer changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from cluster import Answer, Cluster, make_prompt, running_cluster

PAGE = 16
NEW_TOKENS = 20
REQUESTS = 64

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def sent(cluster: Cluster) -> float:
    """Bytes that the prefill worker's agent has written."""
    return (await cluster.metrics("agent-prefill-0"))["baton_agent_fabric_bytes_total"]


async def page_bytes(cluster: Cluster) -> int:
    """Of all layers."""
    (layout,) = {
        (w.layout.layers, w.layout.page_size, w.layout.kv_heads, w.layout.head_dim, w.layout.element_size)
        for w in await cluster.registered_workers()
    }
    layers, page_size, kv_heads, head_dim, element_size = layout
    return 2 * layers * page_size * kv_heads * head_dim * element_size


def computed(answer: Answer) -> int:
    assert answer.timeline is not None
    return sum(chunk.tokens for chunk in answer.timeline.chunks)


async def test_the_second_turn_of_a_chat_moves_and_computes_only_what_is_new(disaggregated: Cluster) -> None:
    first = make_prompt(100, 1)
    answer = await disaggregated.generate(first, max_tokens=NEW_TOKENS, cache_salt="chat")
    second = [*first, *answer.token_ids, *make_prompt(45, 2)]
    alone = await disaggregated.generate(second, max_tokens=NEW_TOKENS)
    before = await sent(disaggregated)
    turn = await disaggregated.generate(second, max_tokens=NEW_TOKENS, cache_salt="chat")
    assert turn.token_ids == alone.token_ids
    # 119 tokens of the first turn were written at the decode worker, 99 at the prefill worker.
    assert turn.timeline is not None and turn.usage is not None
    assert turn.timeline.decode_cached_tokens == 119 // PAGE * PAGE
    assert turn.timeline.prefill_cached_tokens == turn.usage.cached_tokens == 99 // PAGE * PAGE
    assert computed(turn) == len(second) - 1 - 99 // PAGE * PAGE
    pages = -(-(len(second) - 1) // PAGE) - 119 // PAGE
    assert turn.timeline.transfer.pages == pages
    assert await sent(disaggregated) - before == pages * await page_bytes(disaggregated)


@pytest.mark.parametrize("tokens", [5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, 5 * PAGE + 2])
async def test_the_same_prompt_again_at_every_length_around_a_page(disaggregated: Cluster, tokens: int) -> None:
    prompt = make_prompt(tokens, 3)
    first = await disaggregated.generate(prompt, max_tokens=NEW_TOKENS, cache_salt="again")
    before = await sent(disaggregated)
    again = await disaggregated.generate(prompt, max_tokens=NEW_TOKENS, cache_salt="again")
    assert again.token_ids == first.token_ids
    assert again.timeline is not None and again.usage is not None
    cached = (tokens - 1) // PAGE * PAGE
    assert again.usage.cached_tokens == again.timeline.decode_cached_tokens == cached
    assert computed(again) == tokens - 1 - cached
    if cached == tokens - 1:
        assert await sent(disaggregated) == before and again.timeline.prefill_worker == ""
    else:
        assert again.timeline.transfer.pages == 1


async def test_openai_clients_are_told(disaggregated: Cluster) -> None:
    prompt = make_prompt(4 * PAGE + 1, 4)
    client = openai.AsyncOpenAI(base_url=f"{disaggregated.http}/v1", api_key="none", max_retries=0)
    async with client, httpx.AsyncClient() as plain:
        model = (await plain.get(f"{disaggregated.http}/v1/models")).json()["data"][0]["id"]
        told = []
        for salt in ("mine", "mine", "yours"):
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            told.append(answer.usage.prompt_tokens_details.cached_tokens)
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "mine"},
        )
        usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    assert told == [0, 4 * PAGE, 0]
    assert usages[-1].prompt_tokens_details is not None
    assert usages[-1].prompt_tokens_details.cached_tokens == 4 * PAGE


async def test_requests_that_are_broken_off_midway_leave_nothing_wrong(disaggregated: Cluster) -> None:
    rng = random.Random(17)
    prompt = make_prompt(240, 5)
    expected = (await disaggregated.generate(prompt, max_tokens=8)).token_ids
    for _ in range(5):
        task = asyncio.create_task(disaggregated.generate(prompt, max_tokens=8, cache_salt="broken"))
        await asyncio.wait({task}, timeout=rng.uniform(0.02, 0.5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    answers = await asyncio.gather(
        *(disaggregated.generate(prompt, max_tokens=8, cache_salt="broken") for _ in range(3))
    )
    assert [answer.token_ids for answer in answers] == [expected] * 3
    await disaggregated.at_rest(10)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small() -> AsyncIterator[Cluster]:
    """Room for 60 pages at the decode worker and for 90 at the prefill worker."""
    settings = {
        "BATON_DECODE__KV_BYTES": str(60 * 737_280),
        "BATON_PREFILL__KV_BYTES": str(90 * 737_280),
        "BATON_PREFILL__CHUNK_TOKENS": "64",
        "BATON_PREFILL__THREADS": "1",
        "BATON_DECODE__THREADS": "1",
    }
    async with running_cluster(settings=settings) as cluster:
        yield cluster


async def test_pages_that_only_the_prefill_worker_has_cross_without_being_computed(small: Cluster) -> None:
    prompt = make_prompt(20 * PAGE + 1, 6)
    first = await small.generate(prompt, max_tokens=4, cache_salt="")
    # As many other pages as the decode worker has.
    for seed in (7, 8):
        await small.generate(make_prompt(30 * PAGE, seed), max_tokens=4, cache_salt="")
    again = await small.generate(prompt, max_tokens=4, cache_salt="")
    assert again.token_ids == first.token_ids
    assert again.timeline is not None and again.usage is not None
    assert (again.timeline.decode_cached_tokens, again.timeline.transfer.pages) == (0, 20)
    assert again.usage.cached_tokens == again.timeline.prefill_cached_tokens == 20 * PAGE
    assert computed(again) == 0
    await small.at_rest(10)


async def test_64_requests_that_share_beginnings_in_a_small_pool_equal_their_solo_runs(small: Cluster) -> None:
    rng = random.Random(23)
    beginnings = [make_prompt(length, 10 + length) for length in (8 * PAGE, 5 * PAGE + 3, PAGE)]
    asked = []
    for index in range(REQUESTS):
        prompt = (*rng.choice(beginnings), *make_prompt(rng.choice([1, 16, 40]), rng.randrange(3)))
        asked.append((prompt, 1 + index % 9))
    solo = {
        prompt: (await small.generate(list(prompt), max_tokens=9)).token_ids
        for prompt in sorted({prompt for prompt, _ in asked})
    }
    await small.at_rest(10)
    answers = await asyncio.gather(
        *(small.generate(list(prompt), max_tokens=new, cache_salt="", timeout=300) for prompt, new in asked)
    )
    for (prompt, new), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == solo[prompt][:new]
    assert sum(answer.usage.cached_tokens for answer in answers if answer.usage is not None) > 0
    decode = await small.metrics("decode-0")
    assert decode["baton_decode_prefix_cache_hits_total"] > 0
    assert decode["baton_decode_prefix_cache_evictions_total"] > 0
    await small.at_rest(10)
