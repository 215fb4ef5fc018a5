"""Tells whether two workers hold the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Read from each end of a weight file. Its head names every tensor with shape, type and place; whole files would cost
# seconds a gigabyte at every start.
_SAMPLE_BYTES = 1 << 20


def fingerprint(path: Path) -> str:
    """A hash over a GGUF file, or over config.json and the safetensors of a directory; 32 hexadecimal digits.

    Covers names, sizes and both ends of each file, never where they lie. Raises OSError.
    """
    files = [path]
    if path.is_dir():
        files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        # A single GGUF file may be renamed at will.
        name = file.name if path.is_dir() else ""
        found.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as stream:
            found.update(stream.read(_SAMPLE_BYTES))
            if size > _SAMPLE_BYTES:
                stream.seek(max(size - _SAMPLE_BYTES, _SAMPLE_BYTES))
                found.update(stream.read())
    return found.hexdigest()
