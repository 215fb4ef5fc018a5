"""Responses that end their work when the client goes away.

An HTTP server notices a client's leaving by reading from the connection, not by writing to it: between two tokens, or
while a prompt waits for its prefill, nothing is written. So each response here reads beside its work.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton_gateway.errors import ShuttingDown
from baton_gateway.http_errors import to_http

logger = logging.getLogger(__name__)

# nginx's code for it; nobody receives it, but it is what the log shows.
CLIENT_CLOSED_REQUEST = 499

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or what it raised. Raises ClientGone, with the work cancelled and its clean-up done."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        # Also when this very call is cancelled: the work's clean-up is never left behind.
        await asyncio.gather(task, watcher, return_exceptions=True)
    raise ClientGone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Server-sent events, each a JSON object, ended by [DONE].

    The response begins with the first event, so that what fails before is an ordinary error response; what fails later
    is an error object in the stream, which then ends without [DONE].
    """

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        # The length is not known beforehand.
        del self.headers["content-length"]
        self._events = events
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_leaves(receive, self._send(scope, receive, send))
        except (ClientGone, OSError):
            logger.debug("client left a stream")
        except asyncio.CancelledError:
            # Only the server's own end cancels a request; the client is still there, and is told.
            await self._fail(scope, receive, send, ShuttingDown())

    async def _fail(self, scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
        if self._begun:
            await send({"type": "http.response.body", "body": to_http(error).event(), "more_body": False})
        else:
            await to_http(error).response()(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if not self._begun:
                        self._begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _write(send, _encode(event))
            except OSError:
                raise  # the connection broke
            except Exception as error:
                await self._fail(scope, receive, send, error)
                return
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, with the stream's position. The first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(pump(index, stream))
        except ExceptionGroup as failures:
            # All tell of the same HTTP request: the first stands for it.
            raise failures.exceptions[0] from None
        finally:
            # The reader may be waiting for an item; a full queue means that it isn't.
            if not queue.full():
                queue.put_nowait(None)

    task = asyncio.create_task(pump_all())
    try:
        while not (task.done() and queue.empty()):
            numbered = await queue.get()
            if numbered is None:
                break
            yield numbered
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
