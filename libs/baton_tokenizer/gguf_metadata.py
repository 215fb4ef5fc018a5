"""Reads the key-value section of a GGUF file.

The `gguf` library opens a file by making several numpy views for each element of each array: 1.7 to 2.3 s for the
49,152 tokens of the default model, before the first question is answered. The section itself is a flat list, read here
in 0.05 s; tests hold it against the library. Tensors are never looked at.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from baton_tokenizer.errors import MalformedTokenizer, TokenizerNotFound

MetadataValue = int | float | bool | str | list["MetadataValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code (little endian).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# No writer nests arrays; the bound keeps a hostile file from exhausting the stack.
_MAX_ARRAY_DEPTH = 4


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._length = len(data)
        self._offset = 0
        self._path = path

    def malformed(self, what: str) -> MalformedTokenizer:
        return MalformedTokenizer(
            f"{self._path} is not a readable GGUF file: {what} at byte {self._offset}; expected GGUF version 2 or 3, "
            "little endian, complete",
            path=self._path,
            offset=self._offset,
        )

    def take(self, length: int) -> bytes:
        if length > self._length - self._offset:
            raise self.malformed(f"{length} bytes announced where {self._length - self._offset} are left")
        start = self._offset
        self._offset = start + length
        return self._data[start : start + length]

    def scalars(self, code: str, count: int) -> tuple[MetadataValue, ...]:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self.take(count * size))

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.malformed(f"a string that is not UTF-8 ({error.reason})") from error

    def value(self, kind: int, depth: int = 0) -> MetadataValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.malformed(f"unknown value type {kind}")
        return self.scalars(code, 1)[0]

    def _array(self, depth: int) -> MetadataValue:
        if depth == _MAX_ARRAY_DEPTH:
            raise self.malformed(f"arrays nested deeper than {_MAX_ARRAY_DEPTH}")
        kind, count = self.u32(), self.u64()
        # Every element takes a byte at least: a count beyond the file is refused before anything is built from it.
        if count > self._length - self._offset:
            raise self.malformed(f"an array of {count} elements")
        code = _SCALARS.get(kind)
        if code is not None:
            return list(self.scalars(code, count))
        return [self.value(kind, depth + 1) for _ in range(count)]


def read_metadata(path: Path) -> dict[str, MetadataValue]:
    """All key-value pairs of the GGUF file at `path`; arrays as lists.

    Raises TokenizerNotFound if the file cannot be opened, MalformedTokenizer if it is not GGUF version 2 or 3 (little
    endian) or ends early.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise MalformedTokenizer(f"{path} is empty; expected a GGUF file", path=path)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TokenizerNotFound(f"cannot open {path}: {error.strerror}", path=path) from error
    with data:
        cursor = _Cursor(data, path)
        if cursor.take(4) != _MAGIC:
            raise cursor.malformed("no GGUF magic")
        version = cursor.u32()
        if version not in _VERSIONS:
            raise cursor.malformed(f"version {version}")
        cursor.u64()  # number of tensors
        pairs: dict[str, MetadataValue] = {}
        for _ in range(cursor.u64()):
            key = cursor.string()
            pairs[key] = cursor.value(cursor.u32())
        return pairs
