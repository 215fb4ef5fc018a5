"""The asyncio face: the same engine, its events as a stream, and an event loop that is never held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from baton_fabric.engine import (
    Chunk,
    FabricEngine,
    FabricError,
    InboxFull,
    RemoteAccess,
    Stream,
    TransferDone,
    TransferFailed,
)
from baton_memory import LayerCounter, SharedMemory
from baton_telemetry.metrics import DOMAIN_COUNTERS, FABRIC_COUNTERS, FABRIC_LEVELS


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FabricEngine, FabricEngine]]:
    sender, receiver = await FabricEngine.start("tcp"), await FabricEngine.start("tcp")
    yield sender, receiver
    await sender.close()
    await receiver.close()


async def test_a_transfer_from_end_to_end(engines: tuple[FabricEngine, FabricEngine]) -> None:
    sender, receiver = engines
    layers, pages, page_bytes = 3, 8, 4096
    source = SharedMemory.create("source", layers * pages * page_bytes)
    destination = SharedMemory.create("destination", layers * pages * page_bytes)
    source.buffer[:] = np.random.default_rng(1).bytes(source.length)
    layer_counter = LayerCounter.create()
    try:
        ours = await sender.register_region(source.fd, source.length)
        theirs = await receiver.register_region(destination.fd, destination.length)
        counter = sender.attach_counter(layer_counter.memory_fd, layer_counter.doorbell_fd)
        endpoint, [address] = receiver.open_endpoint()
        peer = sender.connect([address])
        receiver.open_inbox(endpoint, 1, 2, layers * pages, [theirs.region])
        stream = Stream(
            ours.region,
            pages * page_bytes,
            page_bytes,
            [RemoteAccess(0, theirs.accesses[0].key, theirs.accesses[0].base)],
            destination.length,
            pages * page_bytes,
            page_bytes,
            [(0, 0, page_bytes)],
        )
        sender.open_transfer(7, peer, 1, 2, counter, layers, [stream], range(pages), list(range(pages)))
        sender.submit_chunks([Chunk(7, 0, 0, pages, True)])
        for layer in range(layers):
            layer_counter.advance(layer + 1)
        async with asyncio.timeout(10):
            done = await anext(sender.events())
            full = await anext(receiver.events())
        assert isinstance(done, TransferDone)
        assert (done.transfer, done.stats.pages) == (7, pages)
        assert isinstance(full, InboxFull)
        assert (full.slot, full.generation, full.extents) == (1, 2, layers * pages)
        assert destination.buffer == source.buffer
        assert receiver.close_inbox(1, 2)
        assert await receiver.close_endpoint(endpoint) == []
        await sender.disconnect(peer)
        sender.detach_counter(counter)
        await sender.deregister_region(ours.region)
        assert sender.metrics()["transfers_done"] == 1
        assert sender.capabilities()[0]["provider"] == sender.provider
    finally:
        layer_counter.close()
        source.close()
        destination.close()


async def test_every_exported_name_is_counted_by_the_core(engines: tuple[FabricEngine, FabricEngine]) -> None:
    assert {*FABRIC_COUNTERS, *FABRIC_LEVELS} <= engines[0].metrics().keys()
    assert all(domain.keys() == DOMAIN_COUNTERS.keys() for domain in engines[0].domain_metrics())


async def test_the_stream_of_events_ends_with_the_engine(engines: tuple[FabricEngine, FabricEngine]) -> None:
    sender, receiver = engines
    layer_counter = LayerCounter.create()
    counter = sender.attach_counter(layer_counter.memory_fd, layer_counter.doorbell_fd)
    _, [address] = receiver.open_endpoint()
    memory = SharedMemory.create("memory", 4096)
    region = await sender.register_region(memory.fd, memory.length)
    stream = Stream(region.region, 0, 0, [RemoteAccess(0, 0, 0)], 4096, 0, 0, [(0, 0, 4096)])
    sender.open_transfer(1, sender.connect([address]), 0, 0, counter, 1, [stream], [0], [0])

    async def collect() -> list[object]:
        return [event async for event in sender.events()]

    collected = asyncio.create_task(collect())
    await asyncio.gather(sender.close(), sender.close())
    async with asyncio.timeout(10):
        (event,) = await collected
    assert isinstance(event, TransferFailed)
    assert (event.transfer, event.reason, event.quiesced) == (1, "ENGINE_CLOSED", True)
    with pytest.raises(FabricError) as caught:
        sender.open_endpoint()
    assert caught.value.reason == "ENGINE_CLOSED"
    layer_counter.close()
    memory.close()


async def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(FabricError) as caught:
        await FabricEngine.start("no-such-provider")
    assert (caught.value.status, caught.value.reason) == ("UNAVAILABLE", "PROVIDER_UNAVAILABLE")
