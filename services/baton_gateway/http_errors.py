"""Every error of the HTTP API, in the one shape that OpenAI's clients know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from starlette.responses import JSONResponse

from baton_rpc import describe

RETRY_AFTER_SECONDS = 1

# gRPC status -> HTTP status and OpenAI's type. What is not here is the server's fault: 500.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "server_error"),
}
_REASON_STATUSES = {"BODY_TOO_LARGE": 413, "BODY_TIMEOUT": 408}


@dataclass(frozen=True)
class HttpError:
    status: int
    message: str
    type: str
    code: str
    param: str | None = None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers())

    def event(self) -> bytes:
        """As a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self.body(), ensure_ascii=False).encode() + b"\n\n"


def to_http(error: BaseException) -> HttpError:
    """Translates any exception; an unknown one is logged and told as an internal error, without its text."""
    told = describe(error)
    status, kind = _STATUSES.get(told.code, (500, "server_error"))
    return HttpError(
        status=_REASON_STATUSES.get(told.reason, status),
        message=told.message,
        type=kind,
        code=told.reason.lower(),
        param=told.fields.get("param"),
    )


def from_status(status: int, message: str) -> HttpError:
    """For what the HTTP framework refuses by itself: unknown paths, wrong methods, and bodies that no JSON parser gets
    through, such as those nested too deeply."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    return HttpError(status, message, kind, codes.get(status, "http_error"))


def from_validation(errors: Sequence[Any]) -> HttpError:
    """For a body that does not have the right shape; names the first parameter at fault."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it does not parse")
        return HttpError(400, f"the body is not valid JSON: {reason}", "invalid_request_error", "invalid_json")
    # Alternatives of one parameter are listed under its name and the name of the alternative's type.
    param = next((str(part) for part in path if isinstance(part, str)), None)
    if param is None:
        message = "the body must be a JSON object"
    else:
        seen = dict.fromkeys(e["msg"] for e in errors if param in e["loc"])
        message = f"{'.'.join(map(str, path)) if len(seen) == 1 else param}: {'; or '.join(seen)}"
    return HttpError(400, message, "invalid_request_error", "invalid_request", param)
