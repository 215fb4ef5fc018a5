"""Memory of a GPU that several processes map: made with a POSIX descriptor, like a memfd."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from ..errors import MemoryInvalid
from ..offer import CUDA
from .device import Device
from .errors import DeviceCallFailed


def round_up(length: int, granularity: int) -> int:
    """The least multiple of `granularity` that is not below `length`."""
    return -(-length // granularity) * granularity


class DeviceMemory:
    """A mapped allocation. `fd` may be handed to other processes; `address` is this process's device pointer.

    `length`: bytes asked for; `mapped_length`: bytes mapped, a multiple of the device's granularity (2 MiB on most).
    The bytes start undefined. A tensor over them: `torch.as_tensor(memory, device=...)`.
    """

    def __init__(
        self,
        device: Device,
        fd: int,
        length: int,
        mapped_length: int,
        address: int,
        mapping: ExitStack,
        reservation: ExitStack,
    ) -> None:
        """Takes ownership of what the two stacks undo; use `create` or `open`."""
        self.device = device
        self.fd = fd
        self.length = length
        self.mapped_length = mapped_length
        self.address = address
        self._mapping = mapping
        self._reservation = reservation

    @classmethod
    def create(cls, device: Device, length: int) -> DeviceMemory:
        """Allocates `length` bytes on `device`.

        Raises MemoryInvalid for a length that is not positive, DeviceCallFailed (RESOURCE_EXHAUSTED if the device has
        no memory left).
        """
        driver = device.driver

        def allocate(size: int, cleanup: ExitStack) -> tuple[Any, int]:
            handle = driver.call("cuMemCreate", size, _properties(device), 0)
            cleanup.callback(driver.call, "cuMemRelease", handle)
            fd = int(driver.call("cuMemExportToShareableHandle", handle, _posix(driver.api), 0))
            cleanup.callback(os.close, fd)
            return handle, fd

        return cls._mapped(device, length, allocate)

    @classmethod
    def open(cls, device: Device, fd: int, length: int) -> DeviceMemory:
        """Maps what another process made on `device`, and owns `fd` from then on.

        Raises MemoryInvalid if it is no memory of a GPU or smaller than `length` bytes, DeviceCallFailed (then the
        caller keeps `fd`).
        """
        driver = device.driver

        def take(size: int, cleanup: ExitStack) -> tuple[Any, int]:
            handle = driver.call("cuMemImportFromShareableHandle", fd, _posix(driver.api))
            cleanup.callback(driver.call, "cuMemRelease", handle)
            return handle, fd

        try:
            memory = cls._mapped(device, length, take)
        except DeviceCallFailed as error:
            if error.fields["call"] not in ("cuMemImportFromShareableHandle", "cuMemMap"):
                raise
            raise MemoryInvalid(
                f"descriptor {fd} is no memory of {length} bytes on GPU {device.uuid}: {error}",
                fd=fd,
                length=length,
                **error.fields,
            ) from error
        memory._mapping.callback(os.close, fd)
        return memory

    @classmethod
    def _mapped(cls, device: Device, length: int, obtain: Callable[[int, ExitStack], tuple[Any, int]]) -> DeviceMemory:
        """`obtain(size, cleanup)` gives handle and descriptor. Whatever fails, all before it is undone, last first."""
        if length <= 0:
            raise MemoryInvalid(f"length must be positive, not {length}", length=length)
        driver, api = device.driver, device.driver.api
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(driver.call("cuMemGetAllocationGranularity", _properties(device), minimum))
        size = round_up(length, granularity)
        with ExitStack() as reservation, ExitStack() as mapping:
            address = int(driver.call("cuMemAddressReserve", size, 0, 0, 0))
            reservation.callback(driver.call, "cuMemAddressFree", address, size)
            handle, fd = obtain(size, mapping)
            driver.call("cuMemMap", address, size, 0, handle, 0)
            mapping.callback(driver.call, "cuMemUnmap", address, size)
            access = api.CUmemAccessDesc()
            device.locate(access)
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            driver.call("cuMemSetAccess", address, size, [access], 1)
            return cls(device, fd, length, size, address, mapping.pop_all(), reservation.pop_all())

    def region(self, name: str) -> dict[str, Any]:
        """As a region of an offer."""
        return {"name": name, "length": self.length, "kind": CUDA, "device": self.device.uuid}

    def dmabuf(self) -> int | None:
        """A dma-buf descriptor of the mapped bytes, which the caller closes; None where the device has none to give.

        Raises DeviceCallFailed.
        """
        if not self.device.dmabuf:
            return None
        driver = self.device.driver
        kind = driver.api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return int(driver.call("cuMemGetHandleForAddressRange", self.address, self.mapped_length, kind, 0))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, as torch, cupy and numba take it."""
        return {"shape": (self.length,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def retire(self) -> None:
        """Gives the memory back, and closes `fd`, but keeps the addresses: nothing else is mapped there until `close`.

        Idempotent. Every step is tried; raises the DeviceCallFailed of the last that fails.
        """
        self.fd = -1
        self._mapping.close()

    def close(self) -> None:
        """Gives memory and addresses back; the addresses only if all the memory went. Idempotent, as `retire`.

        Nothing on the device may use the memory any more.
        """
        self.retire()
        self._reservation.close()

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _posix(api: Any) -> Any:
    return api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(device: Device) -> Any:
    api = device.driver.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _posix(api)
    device.locate(properties)
    properties.allocFlags.gpuDirectRDMACapable = int(device.rdma)
    return properties
