import asyncio

import pytest
from baton.v1 import registry_pb2

from baton_rpc import open_channel
from baton_worker import registration as module
from baton_worker.registration import Registration
from conditions import until
from fake_agent import Gate
from fake_registry import FakeRegistry


@pytest.fixture
async def registry(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(module, "LONGEST_DELAY_S", 0.02)
    directory = tmp_path_factory.mktemp("r")
    registry = await FakeRegistry(f"unix:{directory}/r.sock").start()
    yield registry
    await registry.stop()


@pytest.fixture
async def worker(registry):
    """A registration, with what it announces under `worker.info` and `worker.load`."""
    async with open_channel(registry.target) as channel:
        registration = Registration(channel, lambda: registration.info, lambda: registration.load)
        registration.info = registry_pb2.WorkerInfo(worker_id="w", address="a:1")
        registration.load = registry_pb2.WorkerLoad(free_pages=7)
        yield registration
        await registration.stop()


async def test_registers_with_its_load_and_renews(registry, worker):
    worker.start()
    await until(lambda: registry.leases)
    assert registry.registered[0].load.free_pages == 7
    worker.load = registry_pb2.WorkerLoad(free_pages=3)
    await until(lambda: registry.renewals)
    assert registry.renewals[-1].free_pages == 3
    assert len(registry.registered) == 1


async def test_is_not_there_before_it_can_serve_and_no_more_when_it_cannot(registry, worker):
    info, worker.info = worker.info, None
    worker.start()
    await asyncio.sleep(0)
    assert not registry.registered
    worker.info = info
    worker.changed()
    await until(lambda: registry.workers == ["a:1"])
    worker.info = None
    worker.changed()
    await until(lambda: not registry.leases)


async def test_what_changes_is_announced(registry, worker):
    worker.start()
    await until(lambda: registry.workers == ["a:1"])
    worker.info = registry_pb2.WorkerInfo(worker_id="w", address="a:2")
    worker.changed()
    await until(lambda: registry.workers == ["a:2"])


async def test_a_change_while_registering_is_not_missed(registry, worker):
    registry.gate = Gate()
    worker.start()
    await registry.gate.entered.wait()
    worker.info = None
    worker.changed()
    registry.gate.open()
    await until(lambda: registry.registered and not registry.leases, "the lease given back")


async def test_a_lost_lease_is_taken_again(registry, worker):
    worker.start()
    await until(lambda: registry.leases)
    registry.leases.clear()
    await until(lambda: registry.workers == ["a:1"])


async def test_a_registry_that_goes_and_comes_back_is_reported_once_each_time(registry, worker, caplog):
    caplog.set_level("INFO", logger=module.__name__)
    for times in (1, 2):
        if times == 1:
            registry.down = "UNAVAILABLE"
            worker.start()
        else:
            registry.down = "UNAVAILABLE"
        calls = asyncio.Event()
        registry.gate = _count(4, calls)
        await asyncio.wait_for(calls.wait(), 5)
        registry.down = registry.gate = None
        registry.leases.clear()
        await until(lambda: registry.leases)
        assert caplog.text.count("trying on") == times
        await until(lambda times=times: caplog.text.count("registered again") == times)


async def test_a_registry_process_that_is_started_again_is_found_again(registry, worker):
    worker.start()
    await until(lambda: registry.leases)
    await registry.stop()
    registry.leases.clear()
    await registry.start()
    await until(lambda: registry.leases, timeout=10)


async def test_a_lease_without_a_time_to_live_is_not_renewed_in_a_tight_loop(registry, worker, monkeypatch):
    monkeypatch.setattr(module, "SHORTEST_INTERVAL_S", 3600.0)
    registry.ttl_ms = 0
    worker.start()
    await until(lambda: registry.leases)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not registry.renewals


async def test_leaves_on_stop(registry, worker):
    worker.start()
    await until(lambda: worker._lease is not None)
    await worker.stop()
    assert not registry.leases


async def test_a_registration_under_way_is_taken_back_on_stop(registry, worker):
    registry.gate = Gate()
    worker.start()
    await registry.gate.entered.wait()
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    registry.gate.open()
    await stopping
    await until(lambda: not registry.leases)


def _count(calls, reached):
    left = calls

    async def gate(request, context):
        nonlocal left
        left -= 1
        if left <= 0:
            reached.set()

    return gate
