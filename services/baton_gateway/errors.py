"""Typed errors of the gateway; baton_rpc turns them into gRPC statuses, http_errors into OpenAI's error objects."""

from __future__ import annotations


class GatewayError(Exception):
    """Base of every error raised here."""

    status = "INTERNAL"
    reason = "GATEWAY"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}


class InvalidRequest(GatewayError):
    """The request can never be served as it stands. `param` names the parameter at fault, where there is one."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, param: str | None = None, **fields: object) -> None:
        super().__init__(message, **({"param": param} if param else {}), **fields)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """A parameter of OpenAI's API, or a value of it, that Baton does not serve."""

    reason = "UNSUPPORTED_PARAMETER"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens together are longer than the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """An HTTP body beyond the limit."""

    reason = "BODY_TOO_LARGE"


class BodyTimeout(GatewayError):
    """An HTTP body that did not arrive in time."""

    status = "DEADLINE_EXCEEDED"
    reason = "BODY_TIMEOUT"


class ModelNotFound(GatewayError):
    """A model by a name that is not served here."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class Overloaded(GatewayError):
    """As many requests are in flight as the gateway takes on."""

    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_REQUESTS"


class NoWorker(GatewayError):
    """No worker is there that could serve the request; `reason` tells which is missing."""

    status = "UNAVAILABLE"
    reason = "NO_WORKER"


class NoDecodeWorker(NoWorker):
    reason = "NO_DECODE_WORKER"


class NoPrefillWorker(NoWorker):
    reason = "NO_PREFILL_WORKER"


class NoWorkerForModel(NoWorker):
    reason = "NO_WORKER_FOR_MODEL"


class ShuttingDown(GatewayError):
    """The gateway is ending, and the request did not end in the time that it was left."""

    status = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down; send the request again")


class BrokenStream(GatewayError):
    """A decode worker ended its stream without a finish reason."""

    status = "INTERNAL"
    reason = "DECODE_STREAM_BROKEN"


class InvalidWorker(GatewayError):
    """A worker announced itself with something missing."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_WORKER"


class LeaseNotFound(GatewayError):
    """The lease has expired, was ended, or was replaced: register again."""

    status = "NOT_FOUND"
    reason = "LEASE_NOT_FOUND"
