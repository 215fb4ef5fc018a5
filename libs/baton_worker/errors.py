"""Typed errors of the workers; each carries a gRPC status name, a reason and fields."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of the workers' errors."""

    status = "INTERNAL"
    reason = "WORKER_ERROR"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = {name: str(value) for name, value in fields.items()}


class InvalidRequest(WorkerError):
    """The request can never be served as it stands."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens together are longer than the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {prompt_tokens + max_tokens}, more than "
            f"the model's context of {max_model_len} tokens",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
        )


class ExceedsPagePool(InvalidRequest):
    """The request needs more pages than the worker has in all: waiting would not help."""

    reason = "EXCEEDS_PAGE_POOL"

    def __init__(self, pages: int, total: int) -> None:
        super().__init__(
            f"the request needs {pages} KV pages; this worker has {total} in all: lower max_tokens, or send less",
            pages=pages,
            total=total,
        )


class IncompatibleWorker(WorkerError):
    """Two workers that cannot serve one request together."""

    status = "FAILED_PRECONDITION"
    reason = "INCOMPATIBLE_WORKER"


class QueueFull(WorkerError):
    """Too many requests wait for pages already."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait for KV pages already; try again later", waiting=waiting)


class ReservationTimeout(WorkerError):
    """No pages became free in time."""

    status = "RESOURCE_EXHAUSTED"
    reason = "NO_PAGES_IN_TIME"

    def __init__(self, pages: int, seconds: float) -> None:
        super().__init__(f"{pages} KV pages did not become free within {seconds:.1f} s", pages=pages, seconds=seconds)


class EngineUnavailable(WorkerError):
    """The model process is not there, or died under the request."""

    status = "UNAVAILABLE"
    reason = "ENGINE_UNAVAILABLE"


class StepFailed(WorkerError):
    """A forward step failed in the model process."""

    status = "INTERNAL"
    reason = "STEP_FAILED"


class AgentUnavailable(WorkerError):
    """The node's transfer agent is not there, or died under the request."""

    status = "UNAVAILABLE"
    reason = "AGENT_UNAVAILABLE"


class TransferBroken(WorkerError):
    """A transfer ended without having moved everything."""

    status = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class PrefillUnavailable(WorkerError):
    """No prefill worker could compute the prompt."""

    status = "UNAVAILABLE"
    reason = "PREFILL_UNAVAILABLE"
