"""Typed errors of shared memory and of the hand-off between a model process and its transfer agent."""

from __future__ import annotations


class SharedMemoryError(Exception):
    """Base of this library's errors. `status` is a gRPC code name, `reason` an ErrorInfo reason."""

    status = "INTERNAL"
    reason = "MEMORY"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = {name: str(value) for name, value in fields.items()}


class MemoryInvalid(SharedMemoryError):
    """A descriptor is not the shared memory (or eventfd) that it was said to be."""

    status = "INVALID_ARGUMENT"
    reason = "MEMORY_INVALID"


class MemoryInUse(SharedMemoryError):
    """Something (a tensor, a memoryview) still refers to the mapping that was to be unmapped."""

    status = "FAILED_PRECONDITION"
    reason = "MEMORY_IN_USE"


class CounterMovedBack(SharedMemoryError):
    """A layer counter may only grow."""

    status = "INVALID_ARGUMENT"
    reason = "COUNTER_MOVED_BACK"


class SocketPathInvalid(SharedMemoryError):
    """A unix socket's path is too long, or names something that is not a socket."""

    status = "INVALID_ARGUMENT"
    reason = "SOCKET_PATH_INVALID"


class SocketInUse(SharedMemoryError):
    """Another process listens on the unix socket."""

    status = "ALREADY_EXISTS"
    reason = "SOCKET_IN_USE"


class FrameInvalid(SharedMemoryError):
    """The bytes on a hand-off connection are not the hand-off protocol."""

    status = "INVALID_ARGUMENT"
    reason = "HANDOFF_FRAME_INVALID"


class OfferInvalid(SharedMemoryError):
    """A hand-off whose fields contradict each other, or the descriptors that came with it."""

    status = "INVALID_ARGUMENT"
    reason = "HANDOFF_INVALID"


class HandoffError(SharedMemoryError):
    """The agent could not be reached, or refused the memory; with its own reason and fields."""

    status = "UNAVAILABLE"
    reason = "HANDOFF_FAILED"

    def __init__(
        self, message: str, *, status: str = "UNAVAILABLE", reason: str = "HANDOFF_FAILED", **fields: object
    ) -> None:
        super().__init__(message, **fields)
        self.status = status
        self.reason = reason
