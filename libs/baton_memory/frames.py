"""Frames of the hand-off connection, as pure values: a fixed head, then a JSON object.

    magic "BATN" | version u16 | descriptors u16 | length u32   (little endian), then `length` bytes of JSON

The descriptors that a frame announces travel as SCM_RIGHTS with its first byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FrameInvalid

VERSION = 1
MAGIC = b"BATN"
# A hand-off with a region for each of 250 layers takes 20 KiB; 64 KiB leave room and still bound what a stranger can
# make the agent keep.
MAX_BODY = 64 * 1024
# The kernel's own limit for one message.
MAX_DESCRIPTORS = 253
HEAD = struct.Struct("<4sHHI")


@dataclass(frozen=True)
class Frame:
    descriptors: int
    body: dict[str, Any]


def encode_frame(body: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """Raises FrameInvalid if the body or the number of descriptors is above the limits."""
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > MAX_BODY:
        raise FrameInvalid(f"{len(data)} bytes of JSON, at most {MAX_BODY}", length=len(data))
    if descriptors > MAX_DESCRIPTORS:
        raise FrameInvalid(f"{descriptors} descriptors, at most {MAX_DESCRIPTORS}", descriptors=descriptors)
    return HEAD.pack(MAGIC, VERSION, descriptors, len(data)) + data


class FrameReader:
    """Takes bytes as they come; gives the one frame that a side sends."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Frame | None:
        """The frame once it is whole. Raises FrameInvalid as soon as it can't become one."""
        self._data += data
        seen = bytes(self._data[: len(MAGIC)])
        if not MAGIC.startswith(seen):
            raise FrameInvalid(f"starts with {seen!r}, not {MAGIC!r}")
        if len(self._data) < HEAD.size:
            return None
        _, version, descriptors, length = HEAD.unpack_from(self._data)
        if version != VERSION:
            raise FrameInvalid(f"version {version}, this side speaks {VERSION}", version=version)
        if length > MAX_BODY:
            raise FrameInvalid(f"{length} bytes of JSON announced, at most {MAX_BODY}", length=length)
        if descriptors > MAX_DESCRIPTORS:
            raise FrameInvalid(
                f"{descriptors} descriptors announced, at most {MAX_DESCRIPTORS}", descriptors=descriptors
            )
        end = HEAD.size + length
        if len(self._data) < end:
            return None
        if len(self._data) > end:
            raise FrameInvalid(f"{len(self._data) - end} bytes after the end of the frame")
        try:
            body = json.loads(bytes(self._data[HEAD.size :]))
        except (ValueError, RecursionError) as error:
            raise FrameInvalid(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise FrameInvalid(f"the body is a JSON {type(body).__name__}, not an object")
        return Frame(descriptors, body)
