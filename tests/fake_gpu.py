"""A CUDA driver whose GPU memory is memory of the host, so that bytes move, also between processes."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from collections.abc import Callable
from typing import Any

from fake_cuda import Allocation, CUmemAllocationHandleType, CUmemAllocationProp, Process

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED_NOREPLACE = 0x100000


class CUstream_flags(enum.IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class MemfdAllocation(Allocation):
    def __init__(self, fd: int) -> None:
        super().__init__(os.fstat(fd).st_size, 0)
        self.fd = fd


class HostGpu(Process):
    """One GPU. A stream's work is done when it is given, or recorded while the stream is captured."""

    CUstream_flags = CUstream_flags
    CUstreamCaptureMode = CUstreamCaptureMode

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.captured: list[Callable[[], object]] | None = None
        self.small: dict[int, Any] = {}

    def cuDriverGetVersion(self) -> tuple[int]:
        return (13000,)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:
        return (b"host memory".ljust(length, b"\0"),)

    def cuMemCreate(self, size: int, properties: CUmemAllocationProp, flags: int) -> tuple[int]:
        self._check(properties)
        fd = os.memfd_create("fake-gpu-memory")
        os.ftruncate(fd, size)
        return (self._handle(MemfdAllocation(fd)),)

    def cuMemRelease(self, handle: int) -> None:
        allocation = self.handles.pop(handle)
        assert isinstance(allocation, MemfdAllocation)
        os.close(allocation.fd)

    def cuMemExportToShareableHandle(self, handle: int, kind: CUmemAllocationHandleType, flags: int) -> tuple[int]:
        allocation = self.handles[handle]
        assert isinstance(allocation, MemfdAllocation)
        return (os.dup(allocation.fd),)

    def cuMemImportFromShareableHandle(self, fd: int, kind: CUmemAllocationHandleType) -> tuple[int]:
        return (self._handle(MemfdAllocation(os.dup(fd))),)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        allocation = self.handles[handle]
        assert isinstance(allocation, MemfdAllocation)
        Process.cuMemMap(self, address, size, offset, handle, flags)
        how = mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE
        assert _LIBC.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, how, allocation.fd, 0) == address

    def cuMemUnmap(self, address: int, size: int) -> None:
        Process.cuMemUnmap(self, address, size)
        assert _LIBC.munmap(address, size) == 0

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int]:
        return (address,)

    def cuMemcpyHtoD(self, target: int, source: int, length: int) -> None:
        assert self.stack, "no context is current"
        ctypes.memmove(target, source, length)

    def cuMemcpyDtoH(self, target: int, source: int, length: int) -> None:
        assert self.stack, "no context is current"
        ctypes.memmove(target, source, length)

    def cuStreamCreate(self, flags: CUstream_flags) -> tuple[int]:
        return (self._number(),)

    def cuStreamDestroy(self, stream: int) -> None:
        pass

    def cuStreamSynchronize(self, stream: int) -> None:
        assert self.captured is None

    def cuMemsetD8Async(self, address: int, value: int, length: int, stream: int) -> None:
        self._do(lambda: ctypes.memset(address, value, length))

    def cuStreamWriteValue64(self, stream: int, addr: int, value: int, flags: int) -> None:
        def store() -> None:
            ctypes.c_uint64.from_address(addr).value = value

        self._do(store)

    def cuMemAlloc(self, bytesize: int) -> tuple[int]:
        memory = ctypes.create_string_buffer(bytesize)
        address = ctypes.addressof(memory)
        self.small[address] = memory
        self.allocations[address] = bytesize
        return (address,)

    def cuMemFree(self, dptr: int) -> None:
        super().cuMemFree(dptr)
        del self.small[dptr]

    def launched(self, values: tuple[int, ...]) -> None:
        """The one kernel that there is: baton_store_layer."""
        cell, base, layers = values

        def store() -> None:
            value = ctypes.c_uint64.from_address(base).value + layers
            ctypes.c_uint64.from_address(cell).value = value

        self._do(store)

    def cuStreamBeginCapture(self, stream: int, mode: CUstreamCaptureMode) -> None:
        self.captured = []

    def cuStreamEndCapture(self, stream: int) -> tuple[int]:
        assert self.captured is not None
        number, self.captured = self._graph(self.captured), None
        return (number,)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int]:
        return (self._graph(self.graphs[graph]),)

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        for step in self.graphs[executable]:
            step()

    def cuGraphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def cuGraphExecDestroy(self, executable: int) -> None:
        del self.graphs[executable]

    def _do(self, work: Callable[[], object]) -> None:
        if self.captured is None:
            work()
        else:
            self.captured.append(work)

    def _graph(self, steps: list[Callable[[], object]]) -> int:
        number = self._number()
        self.graphs[number] = steps
        return number
