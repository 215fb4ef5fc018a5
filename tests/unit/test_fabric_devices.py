"""What a GPU asks of the fabric, as far as it shows without one: registration, and a counter that nobody rings."""

import os

import numpy as np
import pytest

from baton_fabric._native import Engine, InboxFull, TransferDone
from baton_fabric.errors import FabricError
from baton_memory import LayerCounter, SharedMemory
from descriptors import open_descriptors
from fabric_harness import Pair, pair

RANGE = (1 << 40, 2 << 20, 0)


def store(counter: LayerCounter, value: int) -> None:
    """As a GPU does: into the cell, and no more."""
    with SharedMemory.open(os.dup(counter.memory_fd), 8) as memory, memory.buffer.cast("Q") as cell:
        cell[0] = value


def test_a_counter_that_is_not_rung_is_seen() -> None:
    with pair("tcp") as both:
        both.sender.fill()
        engine, counter = both.sender.engine, both.sender.layer_counter
        both.sender.counter = engine.attach_counter(counter.memory_fd, counter.doorbell_fd, rung=False)
        transfer = both.open([3], [4])
        engine.submit_chunks([(transfer, 0, 0, 1, True)])
        for value in range(1, both.sender.layers + 1):
            store(counter, value)
        both.receiver.wait(InboxFull)
        both.sender.wait(TransferDone)
        assert (both.receiver.bytes[:, 4] == both.sender.bytes[:, 3]).all()
        engine.detach_counter(both.sender.counter)


def test_the_thread_waits_when_no_chunk_does() -> None:
    engine, counter = Engine("tcp"), LayerCounter.create()
    engine.attach_counter(counter.memory_fd, counter.doorbell_fd, rung=False)
    try:
        before = engine.metrics()["wakeups"]
        for _ in range(3):
            engine.region_retired(1)
        # A thread that spins wakes up from nothing.
        assert engine.metrics()["wakeups"] > before
    finally:
        engine.close()
        counter.close()


def test_a_gpus_memory_is_refused_where_it_was_not_asked_for() -> None:
    engine = Engine("tcp")
    try:
        assert engine.capabilities()[0]["device_memory"] is False
        assert engine.capabilities()[0]["dmabuf"] is False
        with pytest.raises(FabricError) as error:
            engine.register_device_region(*RANGE)
        assert (error.value.status, error.value.reason) == ("FAILED_PRECONDITION", "DEVICE_UNSUPPORTED")
    finally:
        engine.close()


def test_what_the_provider_refuses_leaves_nothing() -> None:
    """shm of every libfabric has the capability; whether there is CUDA behind it shows at the first registration."""
    engine = Engine("shm", device_memory=True)
    before = open_descriptors()
    dmabuf = os.memfd_create("no dma-buf")
    try:
        assert engine.capabilities()[0]["device_memory"] is True
        for arguments, reason in [
            ((0, 4096, 0), "BAD_REGION"),
            ((4096, 0, 0), "BAD_REGION"),
            ((4096, 4096, -1), "BAD_REGION"),
            ((4096, 2**64 - 4096, 0), "BAD_REGION"),
            (RANGE, "FABRIC_CALL_FAILED"),
            ((*RANGE, dmabuf), "FABRIC_CALL_FAILED"),
        ]:
            with pytest.raises(FabricError) as error:
                engine.register_device_region(*arguments)
            assert error.value.reason == reason
        assert engine.metrics()["regions"] == 0
    finally:
        os.close(dmabuf)
        assert open_descriptors() == before
        engine.close()


def test_host_memory_moves_over_a_provider_chosen_for_gpus() -> None:
    with pair("shm") as both:
        both.sender.engine.close()
        engine = both.sender.engine = Engine("shm", device_memory=True)
        both.sender.fill()
        both.sender.region, _ = engine.register_region(both.sender.memory.fd, both.sender.memory.length)
        both.sender.counter = engine.attach_counter(
            both.sender.layer_counter.memory_fd, both.sender.layer_counter.doorbell_fd
        )
        both.connect()
        transfer = both.open([1, 2], [5, 9])
        engine.submit_chunks([(transfer, 0, 0, 2, True)])
        both.run_step(0)
        both.receiver.wait(InboxFull)
        assert (both.receiver.bytes[:, [5, 9]] == both.sender.bytes[:, [1, 2]]).all()
        assert np.count_nonzero(both.receiver.bytes) == 2 * both.sender.layers * both.sender.page_bytes


def test_addresses_are_retired_until_the_endpoints_of_the_time_are_closed() -> None:
    both = Pair("tcp")
    try:
        engine, region = both.receiver.engine, both.receiver.region
        assert not engine.region_retired(region)
        engine.deregister_region(region)
        assert engine.region_retired(region)
        assert not engine.region_retired(region + 1)
        engine.open_endpoint()
        engine.close_endpoint(both.endpoint)
        assert not engine.region_retired(region)
    finally:
        both.close()
