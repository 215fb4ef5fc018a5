"""Engines of several rank processes: the answers of one process, and what happens when a rank goes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from baton_engine import client as engine_client
from baton_engine.client import EngineClient
from baton_engine.errors import AttachFailed, EngineDied, EngineStartFailed, StepFailedError
from baton_engine.messages import AgentLost, EngineSpec, SequenceStart, StepItem, StepPlan
from baton_memory.handoff_server import HandoffServer, ReceivedHandoff
from conditions import until
from engine_driver import GREEDY, Driver
from engine_threads import ThreadEngine
from small_models import SmallModel

# Three heads over two ranks: two and one, and pages of two sizes.
MODEL = SmallModel(heads=6, kv_heads=3, vocabulary=67)
PROMPTS = [[(seed * 7 + 3 * at) % 60 for at in range(2 + 9 * seed)] for seed in range(4)]

module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    path = MODEL.write_hugging_face(tmp_path_factory.mktemp("ranks") / "small")
    return EngineSpec(model_path=str(path), pages=32, page_size=4, max_batch=4, role="test", ranks=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(spec: EngineSpec) -> AsyncIterator[EngineClient]:
    """For all tests that leave it alive."""
    client = await EngineClient.start(spec)
    yield client
    await client.stop()


@pytest_asyncio.fixture
async def engine(spec: EngineSpec) -> AsyncIterator[EngineClient]:
    """An engine that the test may kill."""
    client = await EngineClient.start(spec)
    yield client
    await client.stop(grace_s=0.0)


def pids(client: EngineClient) -> list[int]:
    return [rank._process.pid for rank in client._ranks]


def plan(step: int, sequence_id: int = 7, token: int = 5) -> StepPlan:
    start = SequenceStart(sequence_id, (0,), GREEDY)
    return StepPlan(step, (StepItem(sequence_id, 0, (token,), True, False),), (start,))


@module_loop
async def test_the_tokens_are_those_of_one_process(shared: EngineClient, spec: EngineSpec) -> None:
    single = ThreadEngine(EngineSpec(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "ranks": 1}))
    alone, together = Driver(single), Driver(shared, chunk_tokens=5)  # type: ignore[arg-type]
    wanted = await alone.run([alone.sequence(prompt) for prompt in PROMPTS])
    found = await together.run([together.sequence(prompt) for prompt in PROMPTS])
    single.close()
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    assert shared.info.kv_heads == 3 and shared.info.ranks == 2
    # A failed step leaves the ranks in step: sequence 99 was never started, which both find out.
    with pytest.raises(StepFailedError, match="sequence 99"):
        await shared.step(StepPlan(1000, (StepItem(99, 0, (1,), True, False),)))
    assert (await shared.step(plan(1001))).token_ids
    assert (await shared.inspect(1)).counter == 0, "only rank 0 moves its counter"


@module_loop
async def test_every_rank_hands_its_own_pages_over(shared: EngineClient) -> None:
    taken: list[ReceivedHandoff] = []
    refuse = set[int]()

    async def take(received: ReceivedHandoff) -> dict[str, int]:
        if received.offer.rank in refuse:
            raise EngineDied("no room for this one")
        taken.append(received)
        return {"incarnation": 1}

    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        server = HandoffServer(f"{directory}/handoff", take, lambda connection: None)
        await server.start()
        await shared.attach(f"{directory}/handoff", 11)
        offers = sorted((received.offer for received in taken), key=lambda offer: offer.rank)
        assert [(offer.rank, offer.ranks, offer.session) for offer in offers] == [(0, 2, 11), (1, 2, 11)]
        assert [offer.layout["kv_heads"] for offer in offers] == [2, 1]
        assert {offer.layout["pages"] for offer in offers} == {32} and {o.layout["kv_heads_total"] for o in offers} == {
            3
        }
        assert offers[0].kv_length == 2 * offers[1].kv_length
        refuse.add(1)
        with pytest.raises(AttachFailed, match="no room"):
            await shared.attach(f"{directory}/handoff", 12)
        await server.stop()
        await server.close_all()


async def test_a_rank_that_is_killed_in_a_step_ends_the_engine(engine: EngineClient) -> None:
    """The other waits for it in a sum, asleep; it learns of it at once, and so does who asked for the step."""
    first, second = pids(engine)
    os.kill(second, signal.SIGSTOP)
    step = asyncio.create_task(engine.step(plan(0)))
    waiting = psutil.Process(first)
    await until(lambda: waiting.status() == psutil.STATUS_SLEEPING)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDied, match=f"model process {second} of rank 1 was killed by SIGKILL"):
        await asyncio.wait_for(step, 5)
    await until(lambda: not psutil.pid_exists(first), "the end of the other rank")
    with pytest.raises(EngineDied, match="rank 1"):
        await engine.step(plan(1))


async def test_a_rank_that_hangs_is_found_and_killed(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_STRAGGLER_S", 0.2)
    short = EngineSpec(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "patience_s": 0.2})
    engine = await EngineClient.start(short)
    try:
        os.kill(pids(engine)[1], signal.SIGSTOP)
        with pytest.raises(EngineDied, match="rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(engine.step(plan(0)), 10)
    finally:
        await engine.stop(grace_s=0.0)


async def test_a_model_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    path = SmallModel(heads=6, kv_heads=2).write_hugging_face(tmp_path)
    with pytest.raises(EngineStartFailed, match="3 ranks can't hold 2 heads") as failed:
        await EngineClient.start(EngineSpec(model_path=str(path), pages=4, ranks=3))
    assert failed.value.fields["cause"] == "KV_SHARDING_IMPOSSIBLE"


async def test_the_loss_of_an_agent_is_told_by_every_rank(spec: EngineSpec) -> None:
    lost: list[AgentLost] = []

    async def take(received: ReceivedHandoff) -> dict[str, int]:
        return {"incarnation": 1}

    engine = await EngineClient.start(spec, on_agent_lost=lost.append)
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        server = HandoffServer(f"{directory}/handoff", take, lambda connection: None)
        await server.start()
        await engine.attach(f"{directory}/handoff", 5)
        await server.stop()
        await server.close_all()
        await until(lambda: lost == [AgentLost(5)] * 2)
    await engine.stop()
