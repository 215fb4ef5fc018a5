"""The events of one session, kept until its worker has taken them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.v1 import agent_pb2

from .errors import EventsOverflow

# A worker opens at most some thousand inboxes and transfers between two reads; 100,000 events are some 10 MB.
MAX_EVENTS = 100_000
# A stream whose reader stands still takes 30,000 events and more (of 45 bytes: HTTP/2's windows over a unix socket hold
# megabytes); what a worker has opened meanwhile is far less than this. 1.6 MB.
MAX_UNDER_WAY = 1 << 14


class EventLog:
    """Written by the agent's actors, read by one stream at a time; a newer stream takes over from an older one.

    A stream has taken an event once it asks for the next. That it has reached the worker is not known: a stream begins
    with the last `MAX_UNDER_WAY` that others took, so that some come twice and none is lost with a stream that breaks.
    """

    def __init__(self, on_overflow: Callable[[], None], limit: int = MAX_EVENTS) -> None:
        self._events: deque[agent_pb2.AgentEvent] = deque()
        self._taken: deque[agent_pb2.AgentEvent] = deque(maxlen=MAX_UNDER_WAY)
        self._changed = asyncio.Event()
        self._on_overflow = on_overflow
        self._limit = limit
        self._reader = 0
        self._overflow = False
        self._ended = False

    def __len__(self) -> int:
        """Events that no stream has taken."""
        return len(self._events)

    def emit(self, **event: object) -> None:
        """`emit(inbox_full=InboxFull(...))`. After the end, or an overflow, nobody reads: dropped."""
        if self._ended or self._overflow:
            return
        if len(self._events) >= self._limit:
            self._overflow = True
            self._on_overflow()
        else:
            self._events.append(agent_pb2.AgentEvent(**event))  # type: ignore[arg-type]
        self._changed.set()

    def end(self) -> None:
        """Readers get what is left, then the end of the stream."""
        self._ended = True
        self._changed.set()

    async def read(self) -> AsyncIterator[agent_pb2.AgentEvent]:
        """Raises EventsOverflow instead of leaving a gap."""
        self._reader += 1
        reader = self._reader
        self._events.extendleft(reversed(self._taken))
        self._taken.clear()
        self._changed.set()
        while True:
            while self._events and self._reader == reader:
                event = self._events[0]
                yield event
                if self._events and self._events[0] is event and self._reader == reader:
                    self._taken.append(self._events.popleft())
            if self._reader != reader:
                # Wakes the successor, which may have seen the flag that this reader is about to leave.
                self._changed.set()
                return
            if self._overflow:
                raise EventsOverflow(self._limit)
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()
