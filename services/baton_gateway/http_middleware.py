"""What happens to every HTTP request before it is looked at: an id, and a body of bounded size and time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton_gateway.errors import BodyTimeout, BodyTooLarge
from baton_gateway.http_errors import to_http
from baton_gateway.service import new_request_id

REQUEST_ID_HEADER = "x-request-id"
# A prompt of a million token ids is 7 MB of JSON.
MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
# How many times the limit is read and thrown away of a body that is too large.
DISCARD_FACTOR = 8


class RequestEnvelope:
    """Gives each request an id (`scope["state"]["request_id"]` and a response header) and reads its body.

    The id is made here; a client's own `x-request-id` is for logs only.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int = MAX_BODY_BYTES, body_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            async with asyncio.timeout(self._body_seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = to_http(BodyTimeout(f"the body did not arrive within {self._body_seconds:g} s"))
            await error.response()(scope, receive, send_with_id)
            return
        except BodyTooLarge as error:
            await self._discard(receive)
            response = to_http(error).response()
            response.headers["connection"] = "close"
            await response(scope, receive, send_with_id)
            return
        if body is None:
            return
        await self._app(scope, _replay(body, receive), send_with_id)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client left meanwhile. Raises BodyTooLarge."""
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            raise self._too_large(int(announced))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_large(size)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Reads on for a while: closing on a client that still writes resets the connection, and the answer with it."""
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while size < DISCARD_FACTOR * self._max_body_bytes:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {size} bytes or more; at most {self._max_body_bytes} are allowed",
            size=size,
            limit=self._max_body_bytes,
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes: the client's leaving."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
