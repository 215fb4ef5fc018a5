"""The worker's end of the socket to its model process: an asyncio protocol that matches answers to questions."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from baton_engine.errors import FrameInvalid
from baton_engine.framing import FrameDecoder, encode_frame
from baton_engine.messages import AgentLost, FromModel, Loading, ToModel

logger = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """Questions out, answers in, in the same order; `Loading` and `AgentLost` go to their callbacks.

    `ended` resolves when the socket has ended, to what was wrong with it, or to "" if nothing was.
    """

    def __init__(
        self,
        on_progress: Callable[[Loading], None] | None = None,
        on_agent_lost: Callable[[AgentLost], None] | None = None,
    ) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress
        self._on_agent_lost = on_agent_lost
        self._transport: asyncio.Transport | None = None
        self._questions: deque[asyncio.Future[FromModel]] = deque()
        self._frames = FrameDecoder()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromModel)

    def send(self, message: ToModel) -> asyncio.Future[FromModel]:
        """Sends a question and returns its answer to be. Nobody answers once `ended` is done."""
        answer: asyncio.Future[FromModel] = asyncio.get_running_loop().create_future()
        # Queued even if its asker stops waiting: the answer comes all the same, and must not become another's.
        self._questions.append(answer)
        if self._transport is not None:
            self._transport.write(encode_frame(self._encoder.encode(message)))
        return answer

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports follow the interface without being subclasses of it.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = [self._decoder.decode(frame) for frame in self._frames.feed(data)]
        except (FrameInvalid, msgspec.MsgspecError) as error:
            self._end(f"it sent garbage: {error}")
            self.close()
            return
        for message in messages:
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(str(exc) if exc else "")

    def _take(self, message: FromModel) -> None:
        if isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, AgentLost):
            if self._on_agent_lost is not None:
                self._on_agent_lost(message)
        elif self._questions:
            answer = self._questions.popleft()
            if not answer.done():
                answer.set_result(message)
        else:
            self._end(f"it sent a {type(message).__name__} that nobody had asked for")
            self.close()

    def _end(self, problem: str) -> None:
        if not self.ended.done():
            self.ended.set_result(problem)
