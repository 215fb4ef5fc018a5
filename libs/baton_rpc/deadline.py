"""Deadlines travel: what is left of the incoming call bounds the outgoing ones."""

from typing import Any

import grpc

from baton_actors.deadline import Deadline, DeadlineExceeded

# grpc reports calls without a deadline as one that ends in the far future on some paths.
_UNBOUNDED_SECONDS = 10 * 365 * 86400.0


def remaining(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    """Seconds left of the incoming call, never negative; None if it has no deadline."""
    left = context.time_remaining()
    if left is None or left > _UNBOUNDED_SECONDS:
        return None
    return max(0.0, left)


def incoming_deadline(context: "grpc.aio.ServicerContext[Any, Any]", limit: float | None = None) -> Deadline:
    """The earlier of the incoming call's deadline and ``limit`` seconds from now."""
    left = remaining(context)
    if limit is None:
        return Deadline.after(left)
    return Deadline.after(limit if left is None else min(left, limit))


def outgoing_timeout(context: "grpc.aio.ServicerContext[Any, Any]", limit: float | None = None) -> float | None:
    """Timeout in seconds for a call made on behalf of the incoming one; raises DeadlineExceeded if none is left."""
    left = remaining(context)
    if left is not None and left <= 0:
        raise DeadlineExceeded("the caller's deadline has passed")
    if left is None:
        return limit
    return left if limit is None else min(left, limit)
