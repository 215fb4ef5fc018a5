"""The model process's side of the hand-off: blocking, over a unix socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import FrameInvalid, HandoffError
from .frames import Frame, FrameReader, encode_frame
from .offer import Handoff, parse_offer
from .sockets import check_socket_path

# An agent maps every page of a host's memory before it answers, which takes 0.2 to 0.3 s a GB in pages of 4 KiB; three
# times that and more, since other ranks come at the same time.
_SECONDS_A_BYTE = 1e-9


def mapping_seconds(length: int) -> float:
    """How long an agent may take to map so many bytes, beyond what any answer may take."""
    return length * _SECONDS_A_BYTE


class HandoffConnection:
    """The agent holds the memory as long as this connection lives. Closing it ends the session."""

    def __init__(self, connection: socket.socket, incarnation: int) -> None:
        self._socket = connection
        # The agent's incarnation, as it answered.
        self.incarnation = incarnation

    def fileno(self) -> int:
        """Becomes readable when the agent is gone: after the answer to the offer it sends nothing."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def hand_over(
    path: str,
    offer: Handoff,
    region_fds: Sequence[int],
    counter_memory_fd: int,
    doorbell_fd: int,
    *,
    timeout: float = 30.0,
) -> HandoffConnection:
    """Offers this rank's memory to the agent that listens on `path`, and waits for its answer: up to `timeout` seconds,
    and `mapping_seconds` of all regions.

    `region_fds`: one memfd for each of `offer.regions`; the caller may close all descriptors afterwards. Raises
    OfferInvalid for an offer that no agent would take, SocketPathInvalid, HandoffError with the agent's status, reason
    and fields if it refuses, and with UNAVAILABLE if it can't be reached or goes away.
    """
    check_socket_path(path)
    parse_offer(offer.to_json())
    fds = [*region_fds, counter_memory_fd, doorbell_fd]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        message = encode_frame(offer.to_json(), len(fds))
        sent = socket.send_fds(connection, [message], fds)
        # Whoever refuses may be gone before this call, even of no bytes: the answer tells why.
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(message[sent:])
        connection.settimeout(timeout + mapping_seconds(offer.kv_length))
        answer = _answer(connection).body
        if answer.get("ok") is not True:
            raise _refusal(answer)
        connection.settimeout(None)
        return HandoffConnection(connection, int(answer.get("incarnation", 0)))
    except OSError as error:
        connection.close()
        raise HandoffError(f"no agent at {path!r}: {error}", path=path) from error
    except BaseException:
        connection.close()
        raise


def _refusal(answer: Mapping[str, Any]) -> HandoffError:
    error = HandoffError(
        f"the agent refused the memory: {answer.get('message', 'no message')}",
        status=str(answer.get("status", "INTERNAL")),
        reason=str(answer.get("reason", "HANDOFF_REFUSED")),
    )
    fields = answer.get("fields")
    if isinstance(fields, dict):
        error.fields.update({str(name): str(value) for name, value in fields.items()})
    return error


def _answer(connection: socket.socket) -> Frame:
    reader = FrameReader()
    while True:
        data = connection.recv(4096)
        if not data:
            raise HandoffError("the agent closed the connection before it answered")
        try:
            frame = reader.feed(data)
        except FrameInvalid as error:
            raise HandoffError(f"the agent's answer is malformed: {error}", status="INTERNAL") from error
        if frame is not None:
            return frame
