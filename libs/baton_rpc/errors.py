"""Typed errors to gRPC statuses and back.

Any exception with ``status`` (a gRPC code name), ``reason`` (UPPER_SNAKE) and ``fields`` (str to str) becomes a gRPC
status whose details carry a ``google.rpc.ErrorInfo``. The client gets the same three back in a `RemoteError`, which
follows the convention itself, so that a service may let a callee's error pass through unchanged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

logger = logging.getLogger(__name__)

DOMAIN = "baton"

# Trailing metadata is limited to 8 KiB by default; a longer status would arrive as an opaque RESOURCE_EXHAUSTED.
_MESSAGE_LIMIT = 1500
_FIELD_LIMIT = 500
_FIELDS_LIMIT = 8

_DETAILS_KEY = "grpc-status-details-bin"


@runtime_checkable
class TypedError(Protocol):
    """What an exception must offer to be told to the caller as it is."""

    status: str
    reason: str
    fields: dict[str, str]


@dataclass(frozen=True)
class ErrorStatus:
    """An error as it goes over the wire."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: Mapping[str, str] = field(default_factory=dict)

    def to_proto(self) -> status_pb2.Status:
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=dict(self.fields))
        detail = any_pb2.Any()
        detail.Pack(info)
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=[detail])


def describe(error: BaseException) -> ErrorStatus:
    """The status that tells ``error``; unknown exceptions are logged with their traceback and told as INTERNAL."""
    if isinstance(error, grpc.aio.AioRpcError):
        error = RemoteError.from_rpc(error)
    if isinstance(error, TypedError) and error.status in grpc.StatusCode.__members__:
        code = grpc.StatusCode[error.status]
        if code is not grpc.StatusCode.OK:
            fields = {
                str(key): _shortened(str(value), _FIELD_LIMIT)
                for key, value in list(error.fields.items())[:_FIELDS_LIMIT]
            }
            return ErrorStatus(code, _shortened(str(error), _MESSAGE_LIMIT), error.reason, fields)
    if isinstance(error, TimeoutError):
        return ErrorStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed", "DEADLINE_EXCEEDED")
    logger.error("unexpected %s in a handler", type(error).__name__, exc_info=error)
    return ErrorStatus(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details", "INTERNAL")


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: BaseException) -> NoReturn:
    """Ends the call with the status of ``error``."""
    status = rpc_status.to_status(describe(error).to_proto())
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))


class RemoteError(Exception):
    """A call failed: what the callee (or, for UNAVAILABLE and the like, the channel) said."""

    def __init__(self, status: str, message: str, reason: str = "", fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or status
        self.fields = dict(fields or {})

    def __repr__(self) -> str:
        return f"RemoteError({self.status}, {self.reason}, {self.message!r}, {self.fields})"

    @classmethod
    def from_rpc(cls, error: grpc.aio.AioRpcError) -> "RemoteError":
        """Takes the ErrorInfo out of a failed call; without one the reason is the code's name."""
        reason = ""
        fields: dict[str, str] = {}
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS_KEY and isinstance(value, bytes):
                reason, fields = _error_info(value)
        return cls(error.code().name, error.details() or "", reason, fields)


def _error_info(encoded: bytes) -> tuple[str, dict[str, str]]:
    status = status_pb2.Status()
    try:
        status.ParseFromString(encoded)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) and detail.Unpack(info):
                return info.reason, dict(info.metadata)
    except ValueError:  # protobuf's DecodeError: the peer is not one of ours
        return "", {}
    return "", {}


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
