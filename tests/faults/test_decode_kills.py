"""The decode side killed while a prompt is in transfer, an agent that stands still, and an answer that is too late."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
import pytest_asyncio

from cluster import Cluster, make_prompt, running_cluster
from conditions import until
from victims import NEW_TOKENS, PROMPT_TOKENS, SETTINGS, ask, bytes_move, check, is_right

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(settings=SETTINGS) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(cluster: Cluster) -> list[int]:
    return (await cluster.generate(make_prompt(PROMPT_TOKENS), max_tokens=NEW_TOKENS)).token_ids


@pytest.mark.parametrize("part", ["worker", "model process", "agent"])
async def test_a_killed_part_of_the_decode_side_leaves_nothing(
    cluster: Cluster, expected: list[int], part: str
) -> None:
    await cluster.at_rest(5)
    prefill = cluster.services["prefill-0"].pid
    request = asyncio.create_task(ask(cluster, PROMPT_TOKENS, cache_salt=part))
    await bytes_move(cluster, "agent-prefill-0")
    agent = psutil.Process(cluster.services["agent-decode-0"].pid)
    {
        "worker": cluster.services["decode-0"].kill,
        "model process": cluster.services["decode-0"].model_process().kill,
        "agent": cluster.services["agent-decode-0"].kill,
    }[part]()
    at = time.monotonic()
    outcome = await asyncio.wait_for(request, 40)
    assert time.monotonic() - at < 10
    check(outcome, expected)
    assert cluster.services["prefill-0"].pid == prefill and cluster.services["prefill-0"].running
    await cluster.at_rest(10)
    if part != "agent":
        assert agent.is_running(), "the agent outlives the model process and the worker"
    if part == "worker":
        cluster.services["decode-0"].start()
    elif part == "agent":
        cluster.services["agent-decode-0"].start()
    await cluster.ready(2, timeout=60)

    async def serves_again() -> bool:
        return is_right(await ask(cluster, PROMPT_TOKENS), expected)

    await until(serves_again, "the decode side serves again", 60)
    # Whatever is cached of it by now.
    assert is_right(await ask(cluster, PROMPT_TOKENS, cache_salt=part), expected)
    await cluster.at_rest(5)


@pytest.mark.parametrize("service", ["agent-prefill-0", "agent-decode-0"])
async def test_what_stands_still_for_a_while_holds_nobody_up(
    cluster: Cluster, expected: list[int], service: str
) -> None:
    """As a network that pauses, then resumes."""
    await cluster.at_rest(5)
    request = asyncio.create_task(ask(cluster, PROMPT_TOKENS))
    await bytes_move(cluster, "agent-prefill-0")
    pid = cluster.services[service].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.wait({request}, timeout=2.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    check(await asyncio.wait_for(request, 30), expected)
    await cluster.ready(2, timeout=60)
    await cluster.at_rest(15)
    assert is_right(await ask(cluster, PROMPT_TOKENS), expected)


async def test_a_deadline_shorter_than_the_transfer_frees_nothing_early(cluster: Cluster, expected: list[int]) -> None:
    """The pages of those who were too late go to others, whose answers must be right."""
    late = await asyncio.gather(*(ask(cluster, PROMPT_TOKENS, seconds) for seconds in (0.05, 0.2, 0.4)))
    for outcome in late:
        assert isinstance(outcome, grpc.aio.AioRpcError) and outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert is_right(await ask(cluster, PROMPT_TOKENS), expected)
    await cluster.at_rest(5)
