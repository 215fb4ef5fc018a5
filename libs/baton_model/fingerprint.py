"""A cheap identity of a checkpoint, by which two workers find that they serve the same model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from . import hugging_face
from .errors import CheckpointNotFound, CheckpointUnreadable
from .gguf_file import GgufFile

# Read from the start of each tensor, so that a fine-tune with the shapes of its base is told from it. A page of the
# file system costs no more than a byte of it.
SAMPLE_BYTES = 4096

# Longest safetensors header that the format's own library accepts.
_MAX_HEADER_BYTES = 100_000_000


def fingerprint(path: str | Path) -> str:
    """64 hex digits over the configuration, every tensor's name, type and shape, the sizes of the files, and the first
    bytes of each tensor. The same for copies of a checkpoint wherever they lie.

    Raises `CheckpointNotFound`, `CheckpointUnreadable`.
    """
    path, digest = Path(path), hashlib.sha256()
    if path.is_dir():
        digest.update(json.dumps(hugging_face.read_config(path).values, sort_keys=True).encode())
        files = hugging_face.tensor_files(path)
        for file in [files] if isinstance(files, Path) else sorted(set(files.values())):
            digest.update(_safetensors_digest(file))
    elif path.is_file():
        for part in GgufFile(path).parts():
            digest.update(_digest(part.path, part.data_offset, part.tensor_offsets))
    else:
        raise CheckpointNotFound(f"{path}: no such GGUF file or Hugging Face directory", path=path)
    return digest.hexdigest()


def _safetensors_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        offsets = [8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path}: this shard of the checkpoint is missing", path=path) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointUnreadable(f"{path}: not a readable safetensors file: {error}", path=path) from error
    return _digest(path, 8 + length, offsets)


def _digest(path: Path, header: int, tensors: list[int]) -> bytes:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(header))
        for offset in sorted(tensors):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
