"""Hugging Face directories: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointNotFound, CheckpointUnreadable, MissingTensor, UnsupportedTensorType
from .settings import Settings
from .weights import WeightSource

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(directory: Path) -> Settings:
    """The directory's config.json. Raises `CheckpointNotFound`, `CheckpointUnreadable`."""
    return Settings(_read_json(directory / CONFIG), directory / CONFIG)


def tensor_files(directory: Path) -> dict[str, Path] | Path:
    """Either the one safetensors file, or the shard of each tensor. Raises `CheckpointNotFound`,
    `CheckpointUnreadable`."""
    if (directory / INDEX).is_file():
        shards = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise CheckpointUnreadable(f"{directory / INDEX}: 'weight_map' must map tensor names to file names")
        return {name: directory / Path(shard).name for name, shard in shards.items()}
    if (directory / SINGLE).is_file():
        return directory / SINGLE
    raise CheckpointNotFound(f"{directory}: neither {SINGLE} nor {INDEX} is there", path=directory)


class SafetensorsWeights(WeightSource):
    """The tensors of a directory's safetensors files. Files are mapped; a tensor is read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        files = tensor_files(directory)
        # Each file with the names in it: to ask a file for its names costs as much as it has tensors.
        self._open: dict[Path, tuple[Any, frozenset[str]]] = {}
        if isinstance(files, Path):
            files = dict.fromkeys(self._file(files)[1], files)
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return tuple(self._holder(name).get_slice(name).get_shape())

    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """See `WeightSource.read`."""
        tensor = self.stored(name, slices)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedTensorType(name, str(tensor.dtype).removeprefix("torch."), self.path)
        return tensor

    def names(self) -> Collection[str]:
        """Of all tensors in the files."""
        return self._files.keys()

    def stored_type(self, name: str) -> str:
        """As safetensors writes it, "BF16" for example. Raises `MissingTensor`."""
        return str(self._holder(name).get_slice(name).get_dtype())

    def stored(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """As `read`, but of whatever type the tensor has in the file. Raises `MissingTensor`."""
        holder = self._holder(name)
        if slices:
            part: torch.Tensor = holder.get_slice(name)[tuple(slice(part.start, part.stop) for part in slices)]
            return part
        tensor: torch.Tensor = holder.get_tensor(name)
        return tensor

    def _holder(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise MissingTensor(name, self.path)
        file, names = self._file(path)
        if name not in names:
            raise MissingTensor(name, path)
        return file

    def _file(self, path: Path) -> tuple[Any, frozenset[str]]:
        if path not in self._open:
            try:
                file: Any = safe_open(path, framework="pt")
                self._open[path] = file, frozenset(file.keys())
            except FileNotFoundError as error:
                raise CheckpointNotFound(f"{path}: this shard of the checkpoint is missing", path=path) from error
            except (SafetensorError, OSError) as error:
                raise CheckpointUnreadable(f"{path}: not a readable safetensors file: {error}", path=path) from error
        return self._open[path]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path} is missing", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointUnreadable(f"{path}: not JSON: {error}", path=path) from error
    except OSError as error:
        raise CheckpointUnreadable(f"{path}: can't be read: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointUnreadable(f"{path}: must hold a JSON object, not a {type(value).__name__}", path=path)
    return value
