"""SIGKILL of each part of the prefill side while a prompt is in transfer; a second prefill worker is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from cluster import Cluster, make_prompt, running_cluster
from conditions import until
from victims import NEW_TOKENS, PROMPT_TOKENS, SETTINGS, ask, bytes_move, check

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(prefill=2, settings=SETTINGS) as cluster:
        yield cluster


async def in_transfer(cluster: Cluster) -> str:
    """Waits until pages of the one running request are on their way; the prefill worker that sends them."""
    found = ""

    async def sending() -> bool:
        nonlocal found
        for name in ("prefill-0", "prefill-1"):
            samples = await cluster.metrics(f"agent-{name}")
            if samples["baton_agent_open_transfers"]:
                found = name
                return True
        return False

    await until(sending, "a transfer", 20)
    await bytes_move(cluster, f"agent-{found}")
    return found


@pytest.mark.parametrize("part", ["worker", "model process", "agent"])
async def test_a_killed_part_costs_nobody_but_itself(cluster: Cluster, part: str) -> None:
    expected = (await cluster.generate(make_prompt(PROMPT_TOKENS), max_tokens=NEW_TOKENS)).token_ids
    await cluster.at_rest(5)
    decode = cluster.services["decode-0"].pid
    request = asyncio.create_task(ask(cluster, PROMPT_TOKENS, cache_salt=part))
    victim = await in_transfer(cluster)
    kill = {
        "worker": cluster.services[victim].kill,
        "model process": cluster.services[victim].model_process().kill,
        "agent": cluster.services[f"agent-{victim}"].kill,
    }[part]
    agent = psutil.Process(cluster.services[f"agent-{victim}"].pid)
    kill()
    at = time.monotonic()
    outcome = await asyncio.wait_for(request, 40)
    assert time.monotonic() - at < 10
    check(outcome, expected)
    assert cluster.services["decode-0"].pid == decode and cluster.services["decode-0"].running
    if part != "agent":
        assert agent.is_running(), "the agent outlives the model process and the worker"
    if part == "worker":
        cluster.services[victim].start()
    elif part == "agent":
        cluster.services[f"agent-{victim}"].start()
    await cluster.at_rest(30)
    await cluster.ready(3, timeout=60)
    # Whatever is cached of it by now.
    check(await ask(cluster, PROMPT_TOKENS, cache_salt=part), expected)

    async def serves_again() -> bool:
        answer = await cluster.generate(make_prompt(PROMPT_TOKENS), max_tokens=NEW_TOKENS)
        assert answer.token_ids == expected
        assert answer.timeline is not None
        return answer.timeline.prefill_worker == victim

    await until(serves_again, f"{victim} serves again", 60)
    await cluster.at_rest(5)
