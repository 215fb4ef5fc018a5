"""A CUDA driver without a GPU, in the place of `cuda.bindings.driver`: records calls, keeps what is held, and objects
to misuse.

Several `Process`es share one `Machine`: what one exports, the other imports. Descriptors are real, so that a leak shows
in /proc/self/fd. `Process.fail` makes the n-th call from now on fail.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

GRANULARITY = 2 << 20


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_UNKNOWN = 999


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemRangeHandleType(enum.IntEnum):
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1


def _location() -> SimpleNamespace:
    return SimpleNamespace(type=CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID, id=0)


class CUmemAllocationProp(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(
            type=CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID,
            requestedHandleTypes=CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE,
            location=_location(),
            allocFlags=SimpleNamespace(gpuDirectRDMACapable=0),
        )


class CUmemAccessDesc(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(location=_location(), flags=CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE)


class Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


class Allocation:
    """Physical memory of a device: there as long as a handle, a mapping or a descriptor is."""

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.device = device


class Machine:
    """GPUs, and what their memory was exported as. `attributes` holds for every GPU: by default all there are."""

    def __init__(self, gpus: int = 1) -> None:
        self.uuids = [uuid.UUID(int=0xBA70 << 96 | number) for number in range(gpus)]
        self.attributes = dict.fromkeys(CUdevice_attribute, 1)
        self.exported: dict[tuple[int, int], Allocation] = {}

    def export(self, allocation: Allocation) -> int:
        fd = os.memfd_create("fake-gpu-memory")
        self.exported[_file(fd)] = allocation
        return fd


class Process:
    """One process's view: the module that the code under test uses. `gpus`: those of the machine that it sees."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = CUmemAllocationType
    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUmemLocationType = CUmemLocationType
    CUmemAccess_flags = CUmemAccess_flags
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUmemRangeHandleType = CUmemRangeHandleType
    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self, machine: Machine | None = None, gpus: list[int] | None = None) -> None:
        self.machine = machine or Machine()
        self.gpus = list(range(len(self.machine.uuids))) if gpus is None else gpus
        self.calls: list[Call] = []
        self.handles: dict[int, Allocation] = {}
        self.ranges: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, Allocation]] = {}
        self.accessible: set[int] = set()
        self.pinned: dict[int, tuple[int, int]] = {}
        self.modules: dict[int, bytes] = {}
        self.allocations: dict[int, int] = {}
        self.contexts: dict[int, int] = {}
        self.stack: list[int] = []
        self._numbers = 0
        self._fail_at = 0
        self._error = CUresult.CUDA_ERROR_UNKNOWN

    # --- for tests ------------------------------------------------------------------------------------------------

    def fail(self, number: int, error: CUresult = CUresult.CUDA_ERROR_UNKNOWN) -> None:
        """The `number`-th call from now (1: the next) does nothing and returns `error`; 0: none does."""
        self._fail_at, self._error = number, error

    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Of the only call of this name."""
        (found,) = [call.arguments for call in self.calls if call.name == name]
        return found

    def held(self) -> dict[str, Any]:
        """What is not given back yet, by kind; empty when there is nothing."""
        kinds = {
            "handles": self.handles,
            "ranges": self.ranges,
            "mappings": self.mappings,
            "pinned": self.pinned,
            "modules": self.modules,
            "allocations": self.allocations,
            "contexts": {device: count for device, count in self.contexts.items() if count},
            "stack": self.stack,
        }
        return {kind: held for kind, held in kinds.items() if held}

    # --- the module -----------------------------------------------------------------------------------------------

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return self._recorded(name, value) if name.startswith("cu") and callable(value) else value

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(Call(name, arguments))
            if self._fail_at:
                self._fail_at -= 1
                if self._fail_at == 0:
                    return (self._error, *_nothing(name))
            try:
                values = function(*arguments)
            except Refused as refusal:
                return (refusal.result, *_nothing(name))
            return (CUresult.CUDA_SUCCESS, *(values or ()))

        return call

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuDeviceGetCount(self) -> tuple[int]:
        return (len(self.gpus),)

    def cuDeviceGet(self, ordinal: int) -> tuple[int]:
        _refuse_unless(0 <= ordinal < len(self.gpus))
        return (ordinal,)

    def cuDeviceGetUuid(self, device: int) -> tuple[SimpleNamespace]:
        return (SimpleNamespace(bytes=self.machine.uuids[self.gpus[device]].bytes),)

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[int]:
        assert 0 <= device < len(self.gpus)
        if "_PCI_" in attribute.name:
            # GPU n of the machine is 000n:n0:0n.0, hexadecimal, of which the driver gives three numbers.
            return ({"DOMAIN": 1, "BUS": 16, "DEVICE": 1}[attribute.name.split("_")[-2]] * self.gpus[device],)
        return (self.machine.attributes[attribute],)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        self.contexts[device] = self.contexts.get(device, 0) + 1
        return (1000 + device,)

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        assert self.contexts[device] > 0
        assert not self.held_but("contexts"), f"context released while there is {self.held()}"
        self.contexts[device] -= 1

    def cuCtxPushCurrent(self, context: int) -> None:
        assert self.contexts.get(context - 1000)
        self.stack.append(context)

    def cuCtxPopCurrent(self) -> tuple[int]:
        return (self.stack.pop(),)

    def cuMemGetAllocationGranularity(
        self, properties: CUmemAllocationProp, option: CUmemAllocationGranularity_flags
    ) -> tuple[int]:
        self._check(properties)
        assert option is CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return (GRANULARITY,)

    def cuMemCreate(self, size: int, properties: CUmemAllocationProp, flags: int) -> tuple[int]:
        self._check(properties)
        assert flags == 0
        _refuse_unless(size > 0 and size % GRANULARITY == 0)
        return (self._handle(Allocation(size, self.gpus[properties.location.id])),)

    def cuMemRelease(self, handle: int) -> None:
        del self.handles[handle]

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int]:
        assert (alignment, address, flags) == (0, 0, 0)
        _refuse_unless(size > 0 and size % GRANULARITY == 0)
        start = self._number() << 40
        self.ranges[start] = size
        return (start,)

    def cuMemAddressFree(self, address: int, size: int) -> None:
        assert address not in self.mappings, "addresses freed while memory is mapped there"
        assert self.ranges.pop(address) == size

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags) == (0, 0)
        assert self.ranges[address] == size
        assert address not in self.mappings
        _refuse_unless(size <= self.handles[handle].size)
        self.mappings[address] = size, self.handles[handle]

    def cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mappings.pop(address)[0] == size
        self.accessible.discard(address)

    def cuMemSetAccess(self, address: int, size: int, descriptors: list[CUmemAccessDesc], count: int) -> None:
        assert self.mappings[address][0] == size
        assert len(descriptors) == count == 1
        assert descriptors[0].location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert self.gpus[descriptors[0].location.id] == self.mappings[address][1].device
        assert descriptors[0].flags is CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.accessible.add(address)

    def cuMemExportToShareableHandle(self, handle: int, kind: CUmemAllocationHandleType, flags: int) -> tuple[int]:
        assert kind is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert flags == 0
        return (self.machine.export(self.handles[handle]),)

    def cuMemImportFromShareableHandle(self, fd: int, kind: CUmemAllocationHandleType) -> tuple[int]:
        assert kind is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        allocation = self.machine.exported.get(_file(fd))
        _refuse_unless(allocation is not None)
        assert allocation is not None
        return (self._handle(allocation),)

    def cuMemGetHandleForAddressRange(
        self, address: int, size: int, kind: CUmemRangeHandleType, flags: int
    ) -> tuple[int]:
        assert kind is CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        assert flags == 0
        assert self.mappings[address][0] == size
        assert address in self.accessible
        return (os.memfd_create("fake-dmabuf"),)

    def cuMemHostRegister(self, address: int, length: int, flags: int) -> None:
        assert self.stack, "no context is current"
        assert address % 4096 == 0
        assert address not in self.pinned
        self.pinned[address] = length, flags

    def cuMemHostUnregister(self, address: int) -> None:
        assert self.stack, "no context is current"
        del self.pinned[address]

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int]:
        assert flags == 0
        assert self.stack, "no context is current"
        assert self.pinned[address][1] & self.CU_MEMHOSTREGISTER_DEVICEMAP
        return (address ^ 1 << 46,)

    def cuModuleLoadData(self, image: bytes) -> tuple[int]:
        assert self.stack, "no context is current"
        assert image.endswith(b"\0"), "the text of a module ends with a zero"
        number = self._number()
        self.modules[number] = image
        return (number,)

    def cuModuleGetFunction(self, hmod: int, name: bytes) -> tuple[int]:
        _refuse_unless(b".entry " + name + b"(" in self.modules[hmod])
        return (hmod,)

    def cuModuleUnload(self, hmod: int) -> None:
        del self.modules[hmod]

    def cuMemAlloc(self, bytesize: int) -> tuple[int]:
        assert self.stack, "no context is current"
        address = self._number() << 40
        self.allocations[address] = bytesize
        return (address,)

    def cuMemFree(self, dptr: int) -> None:
        del self.allocations[dptr]

    def cuStreamWriteValue64(self, stream: int, addr: int, value: int, flags: int) -> None:
        assert self.stack, "no context is current"
        assert flags == 0

    def cuLaunchKernel(
        self,
        f: int,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: int,
        kernelParams: tuple[tuple[int, ...], tuple[type, ...]],
        extra: int,
    ) -> None:
        assert self.stack, "no context is current"
        assert f in self.modules
        values, types = kernelParams
        assert len(values) == len(types)
        assert self.modules[f].count(b".param .u64 ") == len(values)
        self.launched(values)

    def launched(self, values: tuple[int, ...]) -> None:
        """Where a fake with memory does what the kernel does."""

    # --- internals ------------------------------------------------------------------------------------------------

    def held_but(self, *kinds: str) -> dict[str, Any]:
        return {kind: held for kind, held in self.held().items() if kind not in kinds}

    def _check(self, properties: CUmemAllocationProp) -> None:
        assert properties.type is CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert properties.requestedHandleTypes is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert properties.location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert 0 <= properties.location.id < len(self.gpus)
        rdma = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        _refuse_unless(properties.allocFlags.gpuDirectRDMACapable <= self.machine.attributes[rdma])

    def _handle(self, allocation: Allocation) -> int:
        number = self._number()
        self.handles[number] = allocation
        return number

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


class Refused(Exception):
    """The driver's answer to arguments that may come from outside."""

    result = CUresult.CUDA_ERROR_INVALID_VALUE


def _refuse_unless(condition: bool) -> None:
    if not condition:
        raise Refused


def _file(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _nothing(name: str) -> tuple[None, ...]:
    """cuda-bindings gives None in the place of each value of a call that failed."""
    silent = {"cuInit", "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "cuMemRelease", "cuMemAddressFree", "cuMemMap"}
    silent |= {"cuMemUnmap", "cuMemSetAccess", "cuMemHostRegister", "cuMemHostUnregister"}
    silent |= {"cuModuleUnload", "cuMemFree", "cuStreamWriteValue64", "cuLaunchKernel"}
    return () if name in silent else (None,)
