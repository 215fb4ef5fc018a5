"""Many requests at once, and many clients that leave: answers are right, and everything is given back."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from cluster import Cluster, make_prompt

REQUESTS = 64
CLIENTS = 50

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.timeout(900)
async def test_64_requests_at_once_equal_their_solo_runs_twice(disaggregated: Cluster) -> None:
    rng = random.Random(5)
    lengths = [rng.choice([1, 2, 7, 15, 16, 17, 33, 64, 100, 129, 255, 256, 257, 300, 520]) for _ in range(REQUESTS)]
    asked = [(make_prompt(length, index), rng.randrange(1, 24)) for index, length in enumerate(lengths)]
    solo = [(await disaggregated.generate(prompt, max_tokens=new)).token_ids for prompt, new in asked]
    await disaggregated.at_rest(10)
    for _ in range(2):
        answers = await asyncio.gather(
            *(disaggregated.generate(prompt, max_tokens=new, timeout=300) for prompt, new in asked)
        )
        assert [answer.token_ids for answer in answers] == solo
        await disaggregated.at_rest(10)


@pytest.mark.timeout(300)
async def test_50_clients_that_leave_at_random_moments_leave_nothing(disaggregated: Cluster) -> None:
    rng = random.Random(11)
    prompt = make_prompt(300)
    began = time.monotonic()
    expected = (await disaggregated.generate(prompt, max_tokens=12)).token_ids
    duration = time.monotonic() - began

    async def leave(index: int) -> None:
        task = asyncio.create_task(
            disaggregated.generate(make_prompt(rng.randrange(2, 600), index), max_tokens=rng.randrange(1, 30))
        )
        await asyncio.wait({task}, timeout=rng.uniform(0, duration))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.CANCELLED, error

    for start in range(0, CLIENTS, 10):
        await asyncio.gather(*(leave(index) for index in range(start, start + 10)))
    await disaggregated.at_rest(2)
    assert (await disaggregated.generate(prompt, max_tokens=12)).token_ids == expected
