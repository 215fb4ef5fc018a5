"""A whole worker, around engines and an agent that are fakes."""

import asyncio
import os
import signal

import pytest
from baton.v1 import prefill_pb2, prefill_pb2_grpc, registry_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_actors import serve_until_signalled
from baton_config.settings import Settings
from baton_engine.client import EngineClient
from baton_engine.scheduler import Sequence
from baton_rpc import open_channel
from baton_rpc.addresses import AddressError
from baton_telemetry.metrics import PrefillMetrics
from baton_worker import worker as module
from baton_worker.engine_actor import NoHooks
from baton_worker.errors import EngineUnavailable
from baton_worker.worker import Worker
from conditions import until
from fake_agent import FakeAgent
from fake_engine import Engines
from fake_registry import FakeRegistry


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Answers when the test lets it, and cleans up in the background as the real ones do."""

    def __init__(self, worker):
        self._worker = worker
        self.entered = asyncio.Event()
        self.cleaned = False

    async def Run(self, request, context):
        with self._worker.background.attended():
            return await self._run()

    async def _run(self):
        engine = self._worker.engine
        pages = (await engine.reserver.reserve("request", 2, None)).pages
        sequence = Sequence(self._worker.next_sequence_id(), (1, 2, 3), tuple(pages), prefill_only=True)
        stream = engine.actor.submit(sequence, "request")
        self.entered.set()
        try:
            async for _ in stream:
                pass
        finally:
            self._worker.background.spawn(self._clean(), "clean-up")
        return prefill_pb2.RunResponse()

    async def _clean(self):
        await asyncio.sleep(0.01)
        self.cleaned = True


class Running:
    def __init__(self, worker, servicer, agent, engines, registry):
        self.worker, self.servicer = worker, servicer
        self.agent, self.engines, self.registry = agent, engines, registry
        self.task = asyncio.create_task(serve_until_signalled(worker.run()))

    async def registered(self):
        await until(lambda: self.registry.leases or self.task.done(), "the registration")
        if self.task.done():
            self.task.result()
        return next(iter(self.registry.leases.values()))

    async def health(self, channel):
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
        return response.status == health_pb2.HealthCheckResponse.SERVING

    async def end(self):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(self.task, 10)


@pytest.fixture
async def start(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "SHUTDOWN_GRACE_S", 0.05)
    (tmp_path / "model.gguf").touch()
    agent = await FakeAgent().start()
    registry = await FakeRegistry(f"unix:{agent.directory}/r.sock").start()
    engines = Engines({"agent": agent})
    monkeypatch.setattr(EngineClient, "start", engines.start)
    running = []

    def start(**section):
        settings = Settings(
            model={"name": str(tmp_path / "model.gguf")},
            cluster={"registry": registry.target},
            agent={"socket": agent.target},
            tls={"allow_insecure": True},
            prefill={"page_size": 4, "metrics": "", **section},
        )
        role = registry_pb2.WORKER_ROLE_PREFILL
        worker = Worker(settings, settings.prefill, role, PrefillMetrics(), NoHooks(), with_agent=True)
        servicer = Prefill(worker)
        worker.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer, "baton.v1.Prefill")
        running.append(Running(worker, servicer, agent, engines, registry))
        return running[-1]

    yield start
    for one in running:
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
    await registry.stop()
    await agent.close()


async def test_announces_what_it_is_and_leaves_at_the_signal(start):
    running = start(worker_id="p0")
    info = await running.registered()
    assert (info.worker_id, info.role, info.model.name) == ("p0", registry_pb2.WORKER_ROLE_PREFILL, "model")
    assert info.model.fingerprint == "f00d" and info.model.max_model_len == 64
    assert info.layout.pages == 16 and info.sharding.tensor_parallel == 1
    assert info.agent == running.agent.descriptor
    assert info.load.free_pages == info.load.total_pages == 16
    async with open_channel(info.address) as channel:
        await until_healthy(running, channel)
    await running.end()
    assert not running.registry.leases and running.engines.last.stopped
    assert running.worker.background is not None and len(running.worker.background) == 0


async def until_healthy(running, channel):
    async with asyncio.timeout(5):
        while not await running.health(channel):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_dead_engine_is_replaced_with_a_new_pool_and_its_requests_fail(start):
    running = start()
    info = await running.registered()
    async with open_channel(info.address) as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.RunRequest())
        await running.servicer.entered.wait()
        former = running.worker.engine
        running.engines.last.die()
        with pytest.raises(Exception, match="SIGKILL"):
            await call
        await until(lambda: not running.registry.leases, "the worker out of the registry")
        with pytest.raises(EngineUnavailable):
            running.worker.engine  # noqa: B018
        again = await running.registered()
        assert again.worker_id == info.worker_id and again.incarnation == info.incarnation
        engine = running.worker.engine
        assert engine is not former and engine.reserver.pool is not former.reserver.pool
        assert engine.reserver.pool.free == 16
        assert running.worker._metrics.engine_restarts._value.get() == 1
        assert engine.link.current.session != former.client.attached[0]
        await until_healthy(running, channel)
    await running.end()
    assert all(engine.stopped for engine in running.engines.made)


async def test_loses_its_place_in_the_registry_with_its_agent_and_gets_it_back(start):
    running = start()
    await running.registered()
    incarnation = running.agent.incarnation
    await running.agent.restart()
    await until(
        lambda: any(worker.agent.incarnation == incarnation + 1 for worker in running.registry.leases.values()),
        "the registration with the new agent",
    )
    assert running.worker._metrics.agent_reconnects._value.get() == 1
    await running.end()


async def test_a_shutdown_cancels_what_runs_and_waits_for_its_clean_up(start):
    running = start()
    info = await running.registered()
    async with open_channel(info.address) as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.RunRequest())
        await running.servicer.entered.wait()
        await running.end()
        with pytest.raises(Exception):  # noqa: B017 - cancelled or unavailable, as it happens
            await call
    assert running.servicer.cleaned


async def test_health_looks_at_progress(start, monkeypatch):
    """A step that does not end is not health; an idle engine is, and so is one that moves again."""
    monkeypatch.setattr(module, "STALL_S", 0.1)
    running = start()
    info = await running.registered()
    async with open_channel(info.address) as channel:
        await until_healthy(running, channel)
        call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.RunRequest())
        engine = running.engines.last
        await engine.begun(0)
        async with asyncio.timeout(5):
            while await running.health(channel):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        engine.finish()
        await call
        await until_healthy(running, channel)
    await running.end()


@pytest.mark.parametrize("part", ["_describe", "_watch_health"])
async def test_a_worker_that_cannot_be_found_or_looked_at_ends_instead_of_lingering(start, monkeypatch, part):
    running = start()

    def fail():
        raise KeyError("nobody thought of this")

    async def fail_later():
        fail()

    monkeypatch.setattr(running.worker, part, fail if part == "_describe" else fail_later)
    monkeypatch.setattr(running.worker._registration, "_describe", running.worker._describe)
    with pytest.raises(KeyError, match="nobody"):
        await asyncio.wait_for(running.task, 10)
    assert running.engines.last.stopped


async def test_an_address_that_nobody_can_reach_fails_the_start(start):
    """And not silently the registration."""
    running = start(listen="0.0.0.0:0")
    with pytest.raises(AddressError):
        await running.task
