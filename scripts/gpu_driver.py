"""What of the memory and the fabric needs a GPU: the checks of gpu_check.py that use the CUDA driver."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from gpu_models import Skipped, expect

from baton_fabric._native import Engine, InboxFull, TransferDone, libfabric_version
from baton_fabric.errors import FabricError
from baton_memory import Handoff, LayerCounter, SharedMemory, hand_over
from baton_memory.cuda import Device, DeviceCounter, DeviceMemory, Driver, open_driver
from baton_memory.errors import SharedMemoryError
from baton_memory.handoff_server import HandoffServer, ReceivedHandoff

WAIT_S = 20.0
ATTRIBUTES = (
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "GPU_DIRECT_RDMA_SUPPORTED",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "DMA_BUF_SUPPORTED",
    "CAN_USE_64_BIT_STREAM_MEM_OPS",
)
# 8,192 pages of 4,099 times 2 bytes: no multiple of any granularity.
LAYOUT = {
    "order": "MLA",
    "layers": 8,
    "pages": 1024,
    "page_size": 1,
    "kv_heads": 1,
    "kv_heads_total": 1,
    "head_dim": 4099,
    "element_size": 2,
    "dtype": "bfloat16",
}
LENGTH = 8 * 1024 * 4099 * 2


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Seconds that it took. Spins: what is waited for comes from a GPU, and rings nothing."""
    start = time.monotonic()
    while not condition():
        expect(time.monotonic() - start < WAIT_S, f"not within {WAIT_S:.0f} s: {what}")
    return time.monotonic() - start


def pattern(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def write(memory: DeviceMemory, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    with memory.device.current():
        memory.device.driver.call("cuMemcpyHtoD", memory.address, data.ctypes.data, data.nbytes)


def read(memory: DeviceMemory) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.zeros(memory.length, dtype=np.uint8)
    with memory.device.current():
        memory.device.driver.call("cuMemcpyDtoH", data.ctypes.data, memory.address, data.nbytes)
    return data


@contextmanager
def stream_of(device: Device) -> Iterator[Any]:
    driver = device.driver
    with device.current():
        stream = driver.call("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            yield stream
        finally:
            driver.call("cuStreamDestroy", stream)


def child_of(cleanup: ExitStack, program: str, *arguments: str) -> Callable[[], str]:
    """Starts the other process -> its next line of output."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, program, *arguments], stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None

    def end() -> None:
        try:
            child.communicate("", WAIT_S)
        finally:
            child.kill()
            child.wait()

    cleanup.callback(end)
    return child.stdout.readline


# --- memory between two processes -------------------------------------------------------------------------------------


async def importer(path: str, api: Any) -> None:
    """Takes one hand-off, checks the bytes of seed 1, writes those of seed 2, and answers."""
    driver = open_driver(api)
    ended = asyncio.Event()

    def take(received: ReceivedHandoff) -> dict[str, Any]:
        offer = received.offer
        with ExitStack() as cleanup:
            device = cleanup.enter_context(closing(Device.find(driver, str(offer.device))))
            memory = DeviceMemory.open(device, os.dup(received.region_fds[0]), offer.kv_length)
            cleanup.enter_context(memory)
            if not np.array_equal(read(memory), pattern(1, memory.length)):
                raise SharedMemoryError("the importing process reads other bytes than were written")
            write(memory, pattern(2, memory.length))
        return {"incarnation": 1}

    async def on_offer(received: ReceivedHandoff) -> dict[str, Any]:
        return await asyncio.to_thread(take, received)

    server = HandoffServer(path, on_offer, lambda _: ended.set())
    await server.start()
    print("listening", flush=True)
    await ended.wait()
    await server.stop()


def check_two_processes(device: Device, program: str) -> str:
    with ExitStack() as cleanup:
        memory = cleanup.enter_context(DeviceMemory.create(device, LENGTH))
        write(memory, pattern(1, LENGTH))
        expect(np.array_equal(read(memory), pattern(1, LENGTH)), "bytes written are not the bytes read")
        path = f"{cleanup.enter_context(tempfile.TemporaryDirectory())}/handoff"
        line = child_of(cleanup, program, "--importer", path)
        expect(line() == "listening\n", "the importing process did not start")
        counter = cleanup.enter_context(closing(LayerCounter.create()))
        start = time.monotonic()
        offer = Handoff(1, 0, 1, LAYOUT, [memory.region("kv")])
        hand_over(path, offer, [memory.fd], counter.memory_fd, counter.doorbell_fd, timeout=60).close()
        took = time.monotonic() - start
        expect(np.array_equal(read(memory), pattern(2, LENGTH)), "bytes that the other process wrote are not seen here")
    return (
        f"{LENGTH:,} bytes handed over, read and written by another process in {took:.2f} s, mapped as "
        f"{memory.mapped_length:,}"
    )


# --- the layer counter ------------------------------------------------------------------------------------------------


def check_counter(device: Device, program: str) -> str:
    driver = device.driver
    with ExitStack() as cleanup:
        counter = cleanup.enter_context(closing(LayerCounter.create()))
        on_device = cleanup.enter_context(closing(DeviceCounter(device, counter)))
        memory = cleanup.enter_context(DeviceMemory.create(device, LENGTH))
        stream = cleanup.enter_context(stream_of(device))
        for value in range(1, 101):
            driver.call("cuMemsetD8Async", memory.address, value, 1 << 20, stream)
            driver.call("cuStreamWriteValue64", stream, on_device.address, value, 0)
        took = wait_for(lambda: counter.value() == 100, "the host sees the counter at 100")
        driver.call("cuStreamSynchronize", stream)
        expect(bool((read(memory)[: 1 << 20] == 100).all()), "the memory set before the store is not what was set")
    return f"100 stores of the stream seen by the host within {took * 1000:.1f} ms, without a synchronisation"


def check_counter_in_graph(device: Device, program: str) -> str:
    driver, api = device.driver, device.driver.api
    with ExitStack() as cleanup:
        counter = cleanup.enter_context(closing(LayerCounter.create()))
        on_device = cleanup.enter_context(closing(DeviceCounter(device, counter)))
        memory = cleanup.enter_context(DeviceMemory.create(device, LENGTH))
        stream = cleanup.enter_context(stream_of(device))
        driver.call("cuStreamBeginCapture", stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for value in range(1, 5):
            driver.call("cuMemsetD8Async", memory.address, value, 1 << 20, stream)
            driver.call("cuStreamWriteValue64", stream, on_device.address, value, 0)
        graph = driver.call("cuStreamEndCapture", stream)
        cleanup.callback(driver.call, "cuGraphDestroy", graph)
        executable = driver.call("cuGraphInstantiate", graph, 0)
        cleanup.callback(driver.call, "cuGraphExecDestroy", executable)
        expect(counter.value() == 0, "capturing alone moved the counter")
        driver.call("cuGraphLaunch", executable, stream)
        wait_for(lambda: counter.value() == 4, "the host sees what the graph stored")
        driver.call("cuStreamSynchronize", stream)
    return "four stores captured, replayed, seen"


def check_counter_starts_transfer(device: Device, program: str) -> str:
    layers, page = 4, 4096
    with ExitStack() as cleanup:
        counter = cleanup.enter_context(closing(LayerCounter.create()))
        on_device = cleanup.enter_context(closing(DeviceCounter(device, counter)))
        source = cleanup.enter_context(SharedMemory.create("source", layers * page))
        target = cleanup.enter_context(SharedMemory.create("target", layers * page))
        source.buffer[:] = pattern(3, source.length).tobytes()
        sender, receiver = (cleanup.enter_context(closing(Engine("tcp"))) for _ in range(2))
        region, _ = sender.register_region(source.fd, source.length)
        _, [(_, key, base)] = receiver.register_region(target.fd, target.length)
        endpoint, addresses = receiver.open_endpoint()
        receiver.open_inbox(endpoint, 1, 0, layers)
        attached = sender.attach_counter(counter.memory_fd, counter.doorbell_fd, rung=False)
        streams = [(region, page, page, [(0, key, base)], target.length, page, page, [(0, 0, page)])]
        sender.open_transfer(1, sender.connect(addresses), 1, 0, attached, layers, streams, [0], [0])
        sender.submit_chunks([(1, 0, 0, 1, True)])
        stream = cleanup.enter_context(stream_of(device))
        for done in range(1, layers + 1):
            device.driver.call("cuStreamWriteValue64", stream, on_device.address, done, 0)
        events: list[Any] = []

        def full() -> bool:
            events.extend(receiver.events())
            return any(isinstance(event, InboxFull) for event in events)

        wait_for(full, "pages of the host arrive whose layers a GPU declared done")
        expect(target.buffer[:] == source.buffer[:], "the bytes that arrived are not those that were sent")
    return "the agent's engine sent each layer when the GPU's store said so (tcp, pages of the host)"


# --- what may be there or not -----------------------------------------------------------------------------------------


def check_registration(device: Device, program: str) -> str:
    """Whether libfabric takes the memory depends on how it was built, and on the network cards."""
    version = ".".join(map(str, libfabric_version()))
    with DeviceMemory.create(device, LENGTH) as memory:
        outcomes = [f"{name}: {_registration(name, memory)}" for name in ("tcp", "shm", "verbs;ofi_rxm", "efa")]
    return "\n    ".join([f"libfabric {version}", *outcomes])


def _registration(provider: str, memory: DeviceMemory) -> str:
    with ExitStack() as cleanup:
        try:
            engine = cleanup.enter_context(closing(Engine(provider, device_memory=True)))
            dmabuf = memory.dmabuf() if engine.capabilities()[0]["dmabuf"] else None
            if dmabuf is not None:
                cleanup.callback(os.close, dmabuf)
            region, _ = engine.register_device_region(
                memory.address, memory.length, memory.device.ordinal, -1 if dmabuf is None else dmabuf
            )
            engine.deregister_region(region)
        except (FabricError, SharedMemoryError) as error:
            return f"not possible: {error}"
    return f"registered ({engine.provider}, {'dma-buf offered' if dmabuf is not None else 'FI_HMEM_CUDA'})"


PAGES, LAYERS = 64, 8
PAGE = LENGTH // (PAGES * LAYERS)


def receiver(ordinal: int, api: Any) -> None:
    """Has its memory on the GPU written over shm by the process that reads its output."""
    with ExitStack() as cleanup:
        device = cleanup.enter_context(closing(Device(open_driver(api), ordinal)))
        memory = cleanup.enter_context(DeviceMemory.create(device, LENGTH))
        engine = cleanup.enter_context(closing(Engine("shm", device_memory=True)))
        _, [(_, key, base)] = engine.register_device_region(memory.address, LENGTH, ordinal)
        endpoint, [address] = engine.open_endpoint()
        engine.open_inbox(endpoint, 1, 0, PAGES * LAYERS)
        print(json.dumps([key, base, address.hex()]), flush=True)
        wait_for(lambda: any(isinstance(event, InboxFull) for event in engine.events()), "every page arrives")
        same = np.array_equal(read(memory)[: LAYERS * PAGES * PAGE], pattern(4, LENGTH)[: LAYERS * PAGES * PAGE])
        print("same" if same else "other bytes", flush=True)
        sys.stdin.readline()


def check_transfer(device: Device, program: str) -> str:
    with ExitStack() as cleanup:
        memory = cleanup.enter_context(DeviceMemory.create(device, LENGTH))
        write(memory, pattern(4, LENGTH))
        counter = cleanup.enter_context(closing(LayerCounter.create()))
        engine = cleanup.enter_context(closing(Engine("shm", device_memory=True)))
        try:
            region, _ = engine.register_device_region(memory.address, LENGTH, device.ordinal)
        except FabricError as error:
            raise Skipped(str(error)) from error
        line = child_of(cleanup, program, "--receiver", str(device.ordinal))
        key, base, address = json.loads(line() or "[0, 0, null]")
        expect(address is not None, "the receiving process did not start")
        peer = engine.connect([bytes.fromhex(address)])
        attached = engine.attach_counter(counter.memory_fd, counter.doorbell_fd)
        stride = PAGES * PAGE
        streams = [(region, stride, PAGE, [(0, key, base)], LENGTH, stride, PAGE, [(0, 0, PAGE)])]
        pages = list(range(PAGES))
        engine.open_transfer(1, peer, 1, 0, attached, LAYERS, streams, pages, pages)
        engine.submit_chunks([(1, 0, 0, PAGES, True)])
        start = time.monotonic()
        counter.advance(LAYERS)
        wait_for(lambda: any(isinstance(event, TransferDone) for event in engine.events()), "the transfer is done")
        took = time.monotonic() - start
        expect(line() == "same\n", "the bytes that arrived are not those that were sent")
    return f"{LAYERS * PAGES * PAGE:,} bytes written into another process's memory in {took * 1000:.0f} ms"


def check_torch(device: Device, program: str) -> str:
    import torch

    if not torch.cuda.is_available():
        raise Skipped("this torch has no CUDA")
    with DeviceMemory.create(device, LENGTH) as memory:
        tensor = torch.as_tensor(memory, device=f"cuda:{device.ordinal}")
        expect(tensor.data_ptr() == memory.address, "torch made a copy")
        tensor.fill_(7)
        torch.cuda.synchronize()
        expect(bool((read(memory) == 7).all()), "what torch wrote is not in the memory")
        del tensor
    return "a tensor over the shared memory, no copy"


def describe(driver: Driver, device: Device) -> str:
    number = driver.call("cuDeviceGet", device.ordinal)
    name = bytes(driver.call("cuDeviceGetName", 100, number)).split(b"\0")[0].decode()
    lines = [f"GPU {device.ordinal}: {name}, {device.uuid}, driver API {driver.call('cuDriverGetVersion')}"]
    for attribute in ATTRIBUTES:
        kind = getattr(driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        lines.append(f"    {attribute.lower()}: {driver.call('cuDeviceGetAttribute', kind, number)}")
    for package in ("torch", "flashinfer-python", "cuda-bindings"):
        with suppress(PackageNotFoundError):
            lines.append(f"    {package}: {version(package)}")
    return "\n".join(lines)


DRIVER_CHECKS: dict[str, Callable[[Device, str], str]] = {
    "memory of the GPU between two processes": check_two_processes,
    "layer counter, stored to by a stream": check_counter,
    "layer counter, stored to by a captured graph": check_counter_in_graph,
    "layer counter of a GPU starts a transfer": check_counter_starts_transfer,
    "registration with the fabric": check_registration,
    "transfer over shm from GPU memory to GPU memory": check_transfer,
    "torch over shared memory": check_torch,
}
