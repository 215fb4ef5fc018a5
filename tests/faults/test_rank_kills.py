"""SIGKILL of one of an engine's ranks while the others wait for it in a step, on either side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from cluster import Answer, Cluster, running_cluster
from conditions import until
from small_models import TOKENIZER_MINIMUM, SmallModel
from victims import check

PROMPT = [4 + (7 * at) % 250 for at in range(90)]
PREFILLS = ("prefill-0", "prefill-1")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = SmallModel(heads=6, kv_heads=3, vocabulary=TOKENIZER_MINIMUM)
    path = model.write_hugging_face(tmp_path_factory.mktemp("ranks") / "small", tokenizer=True)
    settings = {"BATON_MODEL__NAME": str(path)}
    for section in ("PREFILL", "DECODE"):
        settings |= {
            f"BATON_{section}__TENSOR_PARALLEL": "2",
            f"BATON_{section}__KV_BYTES": "16MiB",
            f"BATON_{section}__CHUNK_TOKENS": "16",
            f"BATON_{section}__PREFIX_CACHE": "false",
        }
    async with running_cluster(prefill=2, settings=settings) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(cluster: Cluster) -> list[int]:
    return (await cluster.generate(PROMPT, max_tokens=8)).token_ids


def second_rank(cluster: Cluster, name: str) -> psutil.Process:
    return cluster.services[name].model_processes()[1]


async def test_of_a_prefill_worker(cluster: Cluster, expected: list[int]) -> None:
    """The decode worker tries the other one, with the same pages."""
    stopped = {name: second_rank(cluster, name) for name in PREFILLS}
    for process in stopped.values():
        process.suspend()
    request = asyncio.create_task(cluster.generate(PROMPT, max_tokens=8))
    victim = ""

    async def waits_in_a_step() -> bool:
        nonlocal victim
        for name in PREFILLS:
            if (await cluster.metrics(f"agent-{name}"))["baton_agent_open_transfers"]:
                victim = name
        return bool(victim)

    await until(waits_in_a_step, "a transfer", 20)
    (other,) = set(PREFILLS) - {victim}
    stopped[other].resume()
    agents = [psutil.Process(service.pid) for name, service in cluster.services.items() if name.startswith("agent-")]
    at = time.monotonic()
    stopped[victim].kill()
    answer = await asyncio.wait_for(request, 40)
    assert time.monotonic() - at < 10
    assert answer.token_ids == expected
    assert answer.timeline is not None
    assert (answer.timeline.prefill_worker, answer.timeline.prefill_retries) == (other, 1)
    assert all(agent.is_running() for agent in agents)
    await cluster.at_rest(30)
    await cluster.ready(3, timeout=60)
    assert len(cluster.services[victim].model_processes()) == 2, "all ranks were started again"

    async def serves_again() -> bool:
        answer = await cluster.generate(PROMPT, max_tokens=8)
        assert answer.token_ids == expected and answer.timeline is not None
        return answer.timeline.prefill_worker == victim

    await until(serves_again, f"{victim} serves again", 60)
    await cluster.at_rest(10)


async def test_of_the_decode_worker(cluster: Cluster, expected: list[int]) -> None:
    process = second_rank(cluster, "decode-0")
    process.suspend()
    request = asyncio.create_task(cluster.generate(PROMPT, max_tokens=8))

    async def waits_in_a_step() -> bool:
        return bool((await cluster.metrics("decode-0"))["baton_decode_running_requests"])

    await until(waits_in_a_step, "a step", 20)
    at = time.monotonic()
    process.kill()
    (outcome,) = await asyncio.wait_for(asyncio.gather(request, return_exceptions=True), 40)
    assert time.monotonic() - at < 10
    check(outcome, expected)  # type: ignore[arg-type]
    await cluster.at_rest(30)
    await cluster.ready(3, timeout=60)

    async def serves_again() -> bool:
        (answer,) = await asyncio.gather(cluster.generate(PROMPT, max_tokens=8), return_exceptions=True)
        return isinstance(answer, Answer) and answer.token_ids == expected

    await until(serves_again, "the decode worker serves again", 60)
    await cluster.at_rest(10)
