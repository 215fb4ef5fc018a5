"""Frames over a byte stream: a 32-bit little-endian length, then so many bytes. Pure: bytes in, frames out."""

from __future__ import annotations

import struct

from baton_engine.errors import FrameInvalid

# The largest honest message is a plan that starts a sequence with a page list: 5 bytes a page, so 16 MiB are three
# million pages. Anything longer is garbage.
MAX_FRAME = 16 * 1024 * 1024

_HEADER = struct.Struct("<I")


def encode_frame(payload: bytes) -> bytes:
    """One frame. Raises FrameInvalid if the payload is empty or longer than MAX_FRAME."""
    _check(len(payload))
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into frames; bytes may come in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Takes bytes and returns the frames that they complete. Raises FrameInvalid on an impossible length."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            _check(length)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _HEADER.size : end]))
            start = end
        del buffer[:start]
        return frames

    def finish(self) -> None:
        """Declares the end of the stream. Raises FrameInvalid if it cut a frame in two."""
        if self._buffer:
            raise FrameInvalid(f"the stream ended inside a frame, after {len(self._buffer)} bytes of it")


def _check(length: int) -> None:
    if not 1 <= length <= MAX_FRAME:
        raise FrameInvalid(f"a frame of {length} bytes; must be 1 to {MAX_FRAME}", length=length)
