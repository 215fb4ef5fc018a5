"""The agent's side of the hand-off: an asyncio server on a unix socket that receives descriptors."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from .counter import COUNTER_BYTES, check_doorbell
from .errors import OfferInvalid, SocketInUse
from .frames import MAX_DESCRIPTORS, FrameReader, encode_frame
from .offer import HOST, Handoff, parse_offer
from .shared import check_memory
from .sockets import clear_stale_socket

_RECEIVE_BYTES = 64 * 1024
# Connections that have not yet made an offer; more are closed at once.
MAX_PENDING = 64
OFFER_TIMEOUT = 5.0


@dataclass
class ReceivedHandoff:
    """An offer whose descriptors have been checked, but for those of GPU memory: importing it is the check.

    The receiver of this owns the descriptors.
    """

    connection: int
    offer: Handoff
    region_fds: list[int]
    counter_memory_fd: int
    doorbell_fd: int

    def close(self) -> None:
        """Closes the descriptors (registered mappings live on)."""
        for fd in (*self.region_fds, self.counter_memory_fd, self.doorbell_fd):
            if fd >= 0:
                os.close(fd)
        self.region_fds, self.counter_memory_fd, self.doorbell_fd = [], -1, -1


class HandoffServer:
    """Accepts hand-offs.

    `on_offer(received)` decides: it returns fields to add to the answer, or raises a typed error, which becomes the
    answer. The descriptors are closed after it. `on_closed(connection)` is called exactly once for each connection
    whose offer was taken, when it ends for whatever reason.
    """

    def __init__(
        self,
        path: str,
        on_offer: Callable[[ReceivedHandoff], Awaitable[dict[str, Any]]],
        on_closed: Callable[[int], None],
    ) -> None:
        self.path = path
        self._on_offer = on_offer
        self._on_closed = on_closed
        self._numbers = itertools.count(1)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[int, tuple[socket.socket, asyncio.Task[None]]] = {}
        self._pending: set[int] = set()

    async def start(self) -> None:
        """Binds (mode 0600). Raises SocketInUse, SocketPathInvalid, OSError."""
        clear_stale_socket(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(128)
        except BaseException as error:
            listener.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise SocketInUse(f"somebody else has just bound {self.path!r}", path=self.path) from error
            raise
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    async def stop(self) -> None:
        """Stops listening and unlinks the path. Connections stay until `close_all`."""
        if self._listener is None:
            return
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def drop(self, connection: int) -> None:
        """Ends one connection, if it is still there."""
        entry = self._connections.get(connection)
        if entry is not None:
            entry[1].cancel()

    async def close_all(self) -> None:
        """Ends every connection; on_closed has been called for each when this returns."""
        tasks = [task for _, task in self._connections.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError:
                # Out of descriptors, or the peer went away between connect and accept; the loop must live on.
                await asyncio.sleep(0.05)
                continue
            if len(self._pending) >= MAX_PENDING:
                peer.close()
                continue
            peer.setblocking(False)
            number = next(self._numbers)
            self._pending.add(number)
            self._connections[number] = (peer, loop.create_task(self._serve(number, peer)))

    async def _serve(self, number: int, peer: socket.socket) -> None:
        taken = False
        try:
            taken = await self._take_offer(number, peer)
            if taken:
                self._pending.discard(number)
                # Nothing may follow the offer: more bytes end the connection like its closing.
                await _readable(peer)
        except OSError:
            pass
        finally:
            self._pending.discard(number)
            self._connections.pop(number, None)
            peer.close()
            if taken:
                self._on_closed(number)

    async def _take_offer(self, number: int, peer: socket.socket) -> bool:
        fds: list[int] = []
        try:
            async with asyncio.timeout(OFFER_TIMEOUT):
                received = await self._receive(number, peer, fds)
            answer = {"ok": True, **await self._on_offer(received)}
        except TimeoutError:
            return False
        except Exception as error:
            if not hasattr(error, "reason"):
                raise
            answer = {
                "ok": False,
                "status": getattr(error, "status", "INTERNAL"),
                "reason": error.reason,
                "message": str(error),
                "fields": getattr(error, "fields", {}),
            }
        finally:
            for fd in fds:
                os.close(fd)
        try:
            async with asyncio.timeout(OFFER_TIMEOUT):
                await asyncio.get_running_loop().sock_sendall(peer, encode_frame(answer))
        except (OSError, TimeoutError):
            # The peer is gone: the offer, if taken, ends at once, and the caller reports that.
            pass
        return bool(answer["ok"])

    async def _receive(self, number: int, peer: socket.socket, fds: list[int]) -> ReceivedHandoff:
        """Fills `fds` with every descriptor that arrives, so that the caller closes them whatever happens."""
        reader = FrameReader()
        while True:
            data, ancillary, flags = await _receive_some(peer)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    fds.extend(numbers)
            if flags & socket.MSG_CTRUNC or len(fds) > MAX_DESCRIPTORS:
                raise OfferInvalid(f"more than {MAX_DESCRIPTORS} descriptors in one hand-off", descriptors=len(fds))
            if not data:
                raise OfferInvalid("the connection ended before the offer was whole")
            frame = reader.feed(data)
            if frame is not None:
                return _checked(number, parse_offer(frame.body), frame.descriptors, fds)


def _checked(number: int, offer: Handoff, announced: int, fds: list[int]) -> ReceivedHandoff:
    if not announced == len(fds) == offer.descriptors:
        raise OfferInvalid(
            f"the offer needs {offer.descriptors} descriptors (regions, counter, doorbell); {announced} were "
            f"announced, {len(fds)} came",
            expected=offer.descriptors,
            announced=announced,
            received=len(fds),
        )
    *regions, counter, doorbell = fds
    for region, fd in zip(offer.regions, regions, strict=True):
        if region.get("kind", HOST) == HOST:
            check_memory(fd, region["length"])
    check_memory(counter, COUNTER_BYTES)
    check_doorbell(doorbell)
    return ReceivedHandoff(number, offer, regions, counter, doorbell)


async def _readable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(peer, wake)
    try:
        await ready
    finally:
        loop.remove_reader(peer)


async def _receive_some(peer: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
    while True:
        try:
            # Descriptors are close-on-exec: the agent may start no child that keeps a worker's memory alive.
            data, ancillary, flags, _ = peer.recvmsg(
                _RECEIVE_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            await _readable(peer)
        else:
            return data, ancillary, flags
