"""Typed errors of GPU memory."""

from __future__ import annotations

from ..errors import SharedMemoryError


class NoGpu(SharedMemoryError):
    """There is no GPU to use: no cuda-bindings, no driver, or a driver without devices."""

    status = "FAILED_PRECONDITION"
    reason = "NO_GPU"


class DeviceUnknown(SharedMemoryError):
    """The GPU that was named is not among those that this process sees."""

    status = "NOT_FOUND"
    reason = "DEVICE_UNKNOWN"


class DeviceUnsupported(SharedMemoryError):
    """The GPU or its driver lacks what shareable memory needs."""

    status = "FAILED_PRECONDITION"
    reason = "DEVICE_UNSUPPORTED"


class DeviceCallFailed(SharedMemoryError):
    """A call of the CUDA driver failed. Fields: `call`, `error` (the driver's name of it)."""

    reason = "DEVICE_CALL_FAILED"

    def __init__(self, call: str, error: str, *, out_of_memory: bool = False) -> None:
        super().__init__(f"{call} failed: {error}", call=call, error=error)
        if out_of_memory:
            self.status = "RESOURCE_EXHAUSTED"
