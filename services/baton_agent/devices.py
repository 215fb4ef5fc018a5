"""The GPUs of this node, and handed-over memory on its way into the fabric and out of it, wherever it lies."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from threading import Lock

from baton_fabric.engine import FabricEngine, RegisteredRegion
from baton_memory.cuda import Device, DeviceMemory, Driver, NoGpu, open_driver
from baton_memory.errors import SharedMemoryError

from .domains import Domains

logger = logging.getLogger(__name__)

# How often it is asked whether a late write can still reach addresses that were given up.
RETIRED_POLL = 1.0


class Devices:
    """Opens a GPU when memory on it is first handed over, and keeps it until the process ends.

    Calls block; any thread may make them.
    """

    def __init__(self, driver: Driver | NoGpu) -> None:
        self._driver = driver
        self._devices: dict[str, Device] = {}
        self._lock = Lock()

    @classmethod
    def find(cls) -> Devices:
        """What there is here, which may be nothing."""
        try:
            return cls(open_driver())
        except NoGpu as error:
            logger.info("memory of GPUs can't be handed over: %s", error)
            return cls(error)

    @property
    def present(self) -> bool:
        return not isinstance(self._driver, NoGpu)

    def take(self, fd: int, length: int, device: str) -> DeviceMemory:
        """Maps the memory of `length` bytes on the GPU with the uuid `device` that `fd` stands for; the caller keeps
        `fd`. Raises NoGpu, DeviceUnknown, DeviceUnsupported, MemoryInvalid, DeviceCallFailed."""
        if isinstance(self._driver, NoGpu):
            raise NoGpu(f"memory on GPU {device} can't be taken: {self._driver}", device=device)
        with self._lock:
            gpu = self._devices.get(device)
            if gpu is None:
                gpu = self._devices[device] = Device.find(self._driver, device)
        own = os.dup(fd)
        try:
            return DeviceMemory.open(gpu, own, length)
        except BaseException:
            os.close(own)
            raise


@dataclass(frozen=True)
class RegionMemory:
    """A registered region. `device`: its mapping, if it is on a GPU; the engine keeps those of the host."""

    registered: RegisteredRegion
    length: int
    device: DeviceMemory | None


async def register(
    engine: FabricEngine, devices: Devices, domains: Domains, fd: int, length: int, device: str | None
) -> RegionMemory:
    """With the domains that serve its device. `device`: uuid of the GPU that the memory is on, None for the host's.

    Raises FabricError, and what `Devices.take` raises; then nothing is left mapped.
    """
    if device is None:
        return RegionMemory(await engine.register_region(fd, length, domains.host), length, None)
    memory = await asyncio.to_thread(devices.take, fd, length, device)
    try:
        return RegionMemory(await _register_device(engine, domains, memory), length, memory)
    except BaseException:
        await asyncio.to_thread(_close, memory)
        raise


async def deregister(engine: FabricEngine, memory: RegionMemory) -> None:
    """Afterwards the memory is its owner's alone. Raises FabricError, changing nothing, while the engine needs it."""
    await engine.deregister_region(memory.registered.region)
    if memory.device is not None:
        await asyncio.to_thread(_retire, memory.device)


async def forget(engine: FabricEngine, memory: RegionMemory) -> None:
    """Gives the addresses of deregistered GPU memory back, as soon as no late write can reach them."""
    if memory.device is None:
        return
    while True:
        if not engine.region_retired(memory.registered.region):
            break
        await asyncio.sleep(RETIRED_POLL)
    await asyncio.to_thread(_close, memory.device)


async def _register_device(engine: FabricEngine, domains: Domains, memory: DeviceMemory) -> RegisteredRegion:
    serving = domains.of_gpu(await asyncio.to_thread(lambda: memory.device.pci_address))
    dmabuf = await asyncio.to_thread(memory.dmabuf)
    try:
        return await engine.register_device_region(
            memory.address, memory.length, memory.device.ordinal, dmabuf, serving
        )
    finally:
        if dmabuf is not None:
            os.close(dmabuf)


def _retire(memory: DeviceMemory) -> None:
    # A driver that can't unmap has lost the device. The session's end must not fail by it.
    try:
        memory.retire()
    except SharedMemoryError as error:
        logger.error("memory on GPU %s was not given back: %s", memory.device.uuid, error)


def _close(memory: DeviceMemory) -> None:
    try:
        memory.close()
    except SharedMemoryError as error:
        logger.error("addresses of GPU %s were not given back: %s", memory.device.uuid, error)
