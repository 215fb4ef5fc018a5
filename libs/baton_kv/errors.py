"""Base of this package's errors: what a caller needs to answer a request or to log a refusal."""

from __future__ import annotations


class KvError(Exception):
    """An operation on the KV cache's book-keeping was refused; nothing was changed.

    `status` is the name of a gRPC code, `reason` a stable identifier, `fields` the values concerned, as text.
    """

    status: str = "INTERNAL"
    reason: str = "KV_ERROR"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}


class InvalidKvArgument(KvError):
    """A value that no caller may pass: out of range, or not fitting another one."""

    status = "INVALID_ARGUMENT"
    reason = "KV_INVALID_ARGUMENT"
