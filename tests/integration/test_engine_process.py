"""The model process and its client, with a toy for a model: steps, layer counter, hand-off, every way to end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

import engine_toy_model as toy
from baton_engine.client import EngineClient
from baton_engine.errors import (
    AttachFailed,
    EngineDied,
    EngineError,
    EngineStartFailed,
    StepFailedError,
)
from baton_engine.framing import encode_frame
from baton_engine.link import Link
from baton_engine.messages import AgentLost, EngineSpec, Inspect, Loading, Sampling, SequenceStart, StepItem, StepPlan
from baton_memory import LayerCounter, SharedMemory
from baton_memory.handoff_server import HandoffServer, ReceivedHandoff
from engine_driver import GREEDY, Driver

COMMAND = (sys.executable, str(Path(toy.__file__)))
SPEC = EngineSpec(model_path="toy", pages=64, page_size=4, max_batch=4, role="test")
DEADLINE_S = 30.0

module_loop = pytest.mark.asyncio(loop_scope="module")


async def start(spec: EngineSpec = SPEC, **options: Any) -> EngineClient:
    options.setdefault("timeout_s", 60.0)
    return await EngineClient.start(spec, command=COMMAND, **options)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def driver() -> AsyncIterator[Driver]:
    """One engine for all tests that leave it alive."""
    client = await start()
    yield Driver(client)
    await client.stop()


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[EngineClient]:
    """An engine that the test may kill."""
    client = await start()
    yield client
    await client.stop(grace_s=0.0)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory with a short name: a unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        yield Path(directory)


def decode(sequence_id: int, step: int, token: int = 5, *, prefill_only: bool = False) -> StepPlan:
    """A step of one new token of one new sequence."""
    start_ = SequenceStart(sequence_id, (0, 1), None if prefill_only else GREEDY)
    return StepPlan(step, (StepItem(sequence_id, 0, (token,), not prefill_only, prefill_only),), (start_,))


# --- steps ----------------------------------------------------------------------------------------------------------


@module_loop
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 16])
async def test_any_chunking_gives_the_same_tokens(driver: Driver, chunk_tokens: int) -> None:
    prompt = [(7 * index) % 50 for index in range(19)]
    driver.chunk(512)
    (whole,) = await driver.run([driver.sequence(prompt)])
    driver.chunk(chunk_tokens)
    (chunked,) = await driver.run([driver.sequence(prompt)])
    assert chunked.tokens == whole.tokens and len(whole.tokens) == 8
    assert whole.tokens[0] == 1 + sum((token + 1) * (at + 1) for at, token in enumerate(prompt)) % 50


@module_loop
async def test_sequences_that_share_steps_answer_as_alone(driver: Driver) -> None:
    prompts = [[(seed + 3 * index) % 50 for index in range(2 + 5 * seed)] for seed in range(6)]
    driver.chunk(7)
    alone = [(await driver.run([driver.sequence(prompt)]))[0].tokens for prompt in prompts]
    together = await driver.run([driver.sequence(prompt) for prompt in prompts])
    assert [output.tokens for output in together] == alone


@module_loop
async def test_released_sequences_are_forgotten(driver: Driver) -> None:
    outputs = await driver.run([driver.sequence([1, 2, 3], 2) for _ in range(3)])
    assert all(len(output.tokens) == 2 for output in outputs)
    (last,) = await driver.run([driver.sequence([4], 1)])
    assert last.tokens
    assert len((await driver.client.inspect()).sequences) == 1  # its release goes out with the next step


@module_loop
async def test_a_step_tells_its_times_in_order(driver: Driver) -> None:
    before = time.monotonic_ns()
    await driver.run([driver.sequence([1, 2, 3, 4, 5], 2)])
    _, result = driver.steps[-1]
    assert len(result.layer_ends_ns) == toy.LAYERS
    times = [
        before,
        result.started_ns,
        result.forward_ns,
        *result.layer_ends_ns,
        result.forwarded_ns,
        result.finished_ns,
    ]
    assert times == sorted(times) and times[-1] < time.monotonic_ns()
    assert result.compute_us == (result.finished_ns - result.started_ns) // 1000
    assert (result.first_layer_ns, result.last_layer_ns) == (result.layer_ends_ns[0], result.layer_ends_ns[-1])


@module_loop
async def test_logprobs_come_back_for_those_who_asked(driver: Driver) -> None:
    asked, silent = await driver.run(
        [driver.sequence([1, 2], 2, Sampling(temperature=0, logprobs=3)), driver.sequence([1, 2], 2)]
    )
    assert [position.sampled.token_id for position in asked.logprobs] == asked.tokens == silent.tokens
    assert all(len(position.top) == 3 and position.top[0] == position.sampled for position in asked.logprobs)
    assert silent.logprobs == []


@module_loop
async def test_two_steps_at_once_are_refused(driver: Driver) -> None:
    driver.scheduler.add(driver.sequence([1], 1))
    plan = driver.scheduler.next_step()
    assert plan is not None
    running = asyncio.create_task(driver.client.step(plan))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="in flight"):
        await driver.client.step(plan)
    driver.scheduler.complete(await running)


@module_loop
@pytest.mark.parametrize(
    ("token", "cause", "text"),
    [(toy.RAISE, "RUNTIME_ERROR", "told to fail"), (toy.NAN, "NON_FINITE_LOGITS", "NaN")],
)
async def test_a_step_that_fails_is_answered_and_the_process_goes_on(
    driver: Driver, token: int, cause: str, text: str
) -> None:
    driver.scheduler.add(driver.sequence([token]))
    plan = driver.scheduler.next_step()
    assert plan is not None
    with pytest.raises(StepFailedError, match=text) as failed:
        await driver.client.step(plan)
    assert failed.value.fields == {"step": str(plan.step), "cause": cause}
    driver.scheduler.fail(plan.step)
    (after,) = await driver.run([driver.sequence([3], 1)])
    assert after.tokens == [1 + 4]


@module_loop
@pytest.mark.parametrize(
    ("start_", "item", "text"),
    [
        (None, StepItem(9001, 0, (1,), True, False), "never started"),
        (SequenceStart(9002, (0,), GREEDY), StepItem(9002, 3, (1, 2), True, False), "don't fit"),
        (SequenceStart(9003, (64,), GREEDY), StepItem(9003, 0, (1,), True, False), "outside 0 to 63"),
        (SequenceStart(9004, (0,), None), StepItem(9004, 0, (1,), True, False), "can't sample"),
        (SequenceStart(9005, (0,), GREEDY), StepItem(9005, 0, (), True, False), "don't fit"),
    ],
)
async def test_a_plan_that_would_touch_foreign_memory_is_refused(
    driver: Driver, start_: SequenceStart | None, item: StepItem, text: str
) -> None:
    driver.scheduler.add(driver.sequence([1]))
    good = driver.scheduler.next_step()
    assert good is not None
    with pytest.raises(StepFailedError, match=text):
        await driver.client.step(StepPlan(good.step, (item,), (start_,) if start_ else ()))
    driver.scheduler.fail(good.step)


# --- the layer counter and the hand-off -----------------------------------------------------------------------------


class Agent:
    """Takes memory over as a transfer agent does."""

    def __init__(self, directory: Path, refuses: Exception | None = None) -> None:
        self.path = str(directory / f"agent-{id(self):x}.sock")
        self.closed: asyncio.Queue[int] = asyncio.Queue()
        self.memory: SharedMemory | None = None
        self.counter: LayerCounter | None = None
        self.offer: ReceivedHandoff | None = None
        self._refuses = refuses
        self._server = HandoffServer(self.path, self._take, self.closed.put_nowait)

    async def _take(self, received: ReceivedHandoff) -> dict[str, Any]:
        if self._refuses is not None:
            raise self._refuses
        self.offer = dataclasses.replace(received)
        self.memory = SharedMemory.open(os.dup(received.region_fds[0]), received.offer.kv_length)
        self.counter = LayerCounter.open(os.dup(received.counter_memory_fd), os.dup(received.doorbell_fd))
        return {"incarnation": 1}

    def rings(self) -> int:
        """Rings since the last call."""
        assert self.counter is not None
        try:
            return os.eventfd_read(self.counter.doorbell_fd)
        except BlockingIOError:
            return 0

    async def __aenter__(self) -> Agent:
        await self._server.start()
        return self

    async def leave(self) -> None:
        await self._server.close_all()
        await self._server.stop()

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        if self.counter is not None and self.memory is not None:
            self.counter.close()
            self.memory.close()


async def test_the_agent_sees_the_cache_and_every_layer(engine: EngineClient, sockets: Path) -> None:
    async with Agent(sockets) as agent:
        await engine.attach(agent.path, 2**63 + 5)
        assert agent.offer is not None and agent.memory is not None and agent.counter is not None
        assert agent.offer.offer.session == 2**63 + 5
        assert agent.offer.offer.layout == {
            "order": "HND",
            "layers": toy.LAYERS,
            "pages": 64,
            "page_size": 4,
            "kv_heads": 1,
            "kv_heads_total": 1,
            "head_dim": 2,
            "element_size": 4,
            "dtype": "float32",
        }
        assert agent.counter.value() == agent.rings() == 0
        await engine.step(decode(1, 0, token=8, prefill_only=True))
        assert agent.counter.value() == toy.LAYERS and agent.rings() == toy.LAYERS
        assert agent.memory.buffer[: agent.memory.length].cast("f")[0] == 9.0
        # Nothing leaves during a step without a prefill-only sequence: it rings once.
        await engine.step(decode(2, 1))
        assert agent.counter.value() == 2 * toy.LAYERS and agent.rings() == 1


async def test_a_failed_step_leaves_the_counter_until_the_next_step(engine: EngineClient, sockets: Path) -> None:
    async with Agent(sockets) as agent:
        await engine.attach(agent.path, 1)
        assert agent.counter is not None
        await engine.step(decode(1, 0))
        with pytest.raises(StepFailedError):
            await engine.step(decode(2, 1, token=toy.RAISE, prefill_only=True))
        assert agent.counter.value() == toy.LAYERS + 1
        await engine.step(decode(3, 2))
        assert agent.counter.value() == 3 * toy.LAYERS


async def test_the_loss_of_an_agent_is_told_and_another_can_come(sockets: Path) -> None:
    lost: asyncio.Queue[AgentLost] = asyncio.Queue()
    client = await start(on_agent_lost=lost.put_nowait)
    try:
        async with Agent(sockets) as first, Agent(sockets) as second, Agent(sockets) as third:
            await client.attach(first.path, 1)
            await first.leave()
            assert await asyncio.wait_for(lost.get(), DEADLINE_S) == AgentLost(1)
            await client.step(decode(1, 0))
            await client.attach(second.path, 2)
            assert lost.empty()
            # A new session replaces the old one.
            await client.attach(third.path, 3)
            assert await asyncio.wait_for(lost.get(), DEADLINE_S) == AgentLost(2)
            await asyncio.wait_for(second.closed.get(), DEADLINE_S)
            assert third.counter is not None and third.counter.value() == toy.LAYERS
            await client.stop()
            await asyncio.wait_for(third.closed.get(), DEADLINE_S)
    finally:
        await client.stop()


@module_loop
async def test_an_agent_that_is_not_there_or_refuses_is_a_typed_error(driver: Driver, sockets: Path) -> None:
    with pytest.raises(AttachFailed, match="no agent") as failed:
        await driver.client.attach(str(sockets / "nobody.sock"), 4)
    assert failed.value.fields["session"] == "4"
    refusal = EngineError("no room for another session")
    async with Agent(sockets, refuses=refusal) as agent:
        with pytest.raises(AttachFailed, match="no room") as failed:
            await driver.client.attach(agent.path, 5)
    assert failed.value.fields["cause"] == "ENGINE_ERROR"
    (after,) = await driver.run([driver.sequence([3], 1)])
    assert after.tokens


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_a_killed_process_is_noticed_at_once(engine: EngineClient) -> None:
    step = asyncio.create_task(engine.step(decode(1, 0, token=toy.HANG)))
    await asyncio.sleep(0)
    os.kill(engine.info.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDied, match="SIGKILL") as died:
        await step
    # Generous for a loaded machine; it is a few milliseconds.
    assert time.monotonic() - killed < 2.0
    assert engine.exited.done() and engine.exited.result().fields["exit_code"] == "-9"
    assert died.value is not engine.exited.result()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: engine.step(decode(2, 1)),
        lambda: engine.attach("/nowhere", 1),
        engine.inspect,
    ]
    for call in calls:
        with pytest.raises(EngineDied):
            await call()


async def test_a_process_that_sends_garbage_is_ended() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link()
        await loop.create_unix_connection(lambda: link, sock=ours)
        answer = link.send(Inspect())
        theirs.sendall(encode_frame(b"\xc1garbage"))
        assert "garbage" in await asyncio.wait_for(link.ended, DEADLINE_S)
        assert not answer.done()


async def test_garbage_from_the_worker_ends_the_process(engine: EngineClient) -> None:
    engine._ranks[0]._link._transport.write(b"\xff" * 8)  # type: ignore[union-attr]
    died = await asyncio.wait_for(asyncio.shield(engine.exited), DEADLINE_S)
    assert "exited with code 1" in str(died) and "garbage" in died.fields["stderr"]


async def test_stopping_is_graceful_and_can_be_repeated(engine: EngineClient) -> None:
    pid = engine.info.pid
    await engine.stop()
    await engine.stop()
    assert "was stopped" in str(engine.exited.result())
    assert not psutil.pid_exists(pid)


async def test_a_process_that_does_not_leave_is_killed(engine: EngineClient) -> None:
    step = asyncio.create_task(engine.step(decode(1, 0, token=toy.HANG)))
    await asyncio.sleep(0)
    await engine.stop(grace_s=0.1)
    with pytest.raises(EngineDied):
        await step
    assert not psutil.pid_exists(engine.info.pid)


def test_a_killed_worker_takes_its_model_process_along(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio\n"
        "from baton_engine.client import EngineClient\n"
        "from baton_engine.messages import EngineSpec\n"
        "async def main():\n"
        f"    client = await EngineClient.start(EngineSpec(model_path='toy', pages=4), command={COMMAND!r})\n"
        "    print(client.info.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        child = os.pidfd_open(pid)
        try:
            worker.kill()
            readable, _, _ = select.select([child], [], [], DEADLINE_S)
            assert readable
        finally:
            os.close(child)
    finally:
        worker.kill()
        worker.wait()


def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [*COMMAND, "--fd", str(theirs.fileno()), "--parent", "1"],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 1 and "now a child of" in done.stderr


# --- starts ---------------------------------------------------------------------------------------------------------


async def test_loading_is_reported_and_the_engine_describes_itself(caplog: pytest.LogCaptureFixture) -> None:
    progress: list[Loading] = []
    client = await start(
        EngineSpec(model_path="toy", kv_bytes=200 * 1024, page_size=8, dtype="float32", cpus=(0,), max_batch=2),
        on_progress=progress.append,
    )
    try:
        fractions = [step.fraction for step in progress]
        assert fractions == sorted(fractions) and {"import", "weights", "toy", "cache"} <= {s.stage for s in progress}
        info = client.info
        # 2 planes x 1 head x 8 tokens x 2 dimensions x 4 bytes, in 3 layers.
        assert info.page_bytes == 128 and info.pages == 200 * 1024 // (3 * 128)
        assert (info.model, info.fingerprint, info.eos_token_ids, info.max_batch) == ("toy", "t0", (0,), 2)
        assert os.sched_getaffinity(info.pid) == {0}
        with caplog.at_level(logging.WARNING, "baton_engine"):
            await client.step(decode(1, 0, token=toy.COMPLAIN))
            await client.stop()
        assert any("the toy complains" in record.getMessage() for record in caplog.records)
    finally:
        await client.stop()


@pytest.mark.parametrize(
    ("spec", "status", "cause", "text"),
    [
        (EngineSpec(model_path=toy.REFUSES, pages=1), "NOT_FOUND", "TOY_NOT_FOUND", "no such toy"),
        (EngineSpec(model_path="toy"), "INVALID_ARGUMENT", "ENGINE_SPEC_INVALID", "exactly one"),
        (EngineSpec(model_path="toy", kv_bytes=100), "INVALID_ARGUMENT", "ENGINE_SPEC_INVALID", "kv_bytes is 100"),
        (EngineSpec(model_path=toy.CRASHES, pages=1), "FAILED_PRECONDITION", "ENGINE_DIED", "exited with code 3"),
    ],
    ids=["refused", "no size", "too small", "crash"],
)
async def test_a_model_that_cannot_be_loaded_is_a_typed_error(
    spec: EngineSpec, status: str, cause: str, text: str
) -> None:
    with pytest.raises(EngineStartFailed, match=text) as failed:
        await start(spec)
    assert failed.value.status == status and failed.value.fields["cause"] == cause


async def test_a_load_beyond_its_deadline_is_ended() -> None:
    with pytest.raises(EngineStartFailed, match="not loaded within") as failed:
        await start(EngineSpec(model_path=toy.HANGS, pages=1), timeout_s=1.0)
    assert failed.value.fields["cause"] == "TIMEOUT"


async def test_a_command_that_does_not_exist_is_a_typed_error() -> None:
    with pytest.raises(EngineStartFailed, match="cannot run"):
        await EngineClient.start(SPEC, command=("/nonexistent/python",))
