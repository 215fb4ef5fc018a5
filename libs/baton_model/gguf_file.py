"""GGUF files: metadata and tensors under their GGUF names, and the same tensors as a `WeightSource`."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.tensor_mapping import get_tensor_name_map

from .errors import CheckpointNotFound, CheckpointUnreadable, InvalidConfig, MissingTensor, UnsupportedTensorType
from .settings import Settings
from .weights import WeightSource

_LENGTH = struct.Struct("<Q")
_EXPERT = re.compile(r"(\.mlp\.experts)\.(\d+)\.")
_SPLIT = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
# Read with the configuration, of no effect, and of files that hold the same twice.
_WITHOUT_A_NAME = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_(rot_embd|kv_b)\.weight")
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


class _HeaderReader(gguf.GGUFReader):
    """The library's reader without a Python object for each element of an array.

    The vocabulary and merges are arrays of a hundred thousand strings, and the library's own reader spends 2.2 of
    2.3 s on them for the default model; a model process needs none of them. Here an array of strings is measured and
    left without contents, an array of numbers is one view.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        if gguf.GGUFValueType(raw_type) != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            result: tuple[int, list[Any], list[int], list[gguf.GGUFValueType]] = super()._get_field_parts(
                orig_offs, raw_type
            )
            return result
        raw_element, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, element = orig_offs + 12, gguf.GGUFValueType(raw_element[0])
        types = [gguf.GGUFValueType.ARRAY, element]
        scalar = self.gguf_scalar_to_np.get(element)
        if scalar is not None:
            values = self._get(start, scalar, count[0])
            return 12 + int(values.nbytes), [raw_element, count, values], [2], types
        if element != gguf.GGUFValueType.STRING:
            raise ValueError(f"arrays of {element.name} are not supported")
        end, data = start, self.data.data
        for _ in range(int(count[0])):
            end += 8 + _LENGTH.unpack_from(data, end)[0]
        return end - orig_offs, [raw_element, count], [], types


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file of a model. `data_offset`: bytes before the first tensor; `tensor_offsets`: where each tensor's data
    begins, bytes from the start of the file."""

    path: Path
    data_offset: int
    tensor_offsets: list[int]


class GgufFile:
    """An open GGUF file, or all files of a model that is split over several, named by the first. `metadata` holds every
    scalar and number array; arrays of strings are left out.

    Raises `CheckpointUnreadable`, `CheckpointNotFound`, `InvalidConfig`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if field.data}
        self.settings = Settings(self.metadata, path)
        # Kept in mind for as long as their tensors are used: they hold the mappings.
        self._readers = {path: reader} | {other: _open(other) for other in self._others()}
        self.architecture = self.settings.get("general.architecture", str)
        self._tensors = {tensor.name: tensor for reader in self._readers.values() for tensor in reader.tensors}
        expected = self.settings.get("split.tensors.count", int, len(self._tensors))
        if len(self._tensors) != expected:
            raise CheckpointUnreadable(
                f"{path}: its {len(self._readers)} files have {len(self._tensors)} tensors; it says {expected}",
                path=path,
            )

    def _others(self) -> list[Path]:
        """The files of the model besides the first."""
        count = self.settings.get("split.count", int, 1)
        if count <= 1:
            return []
        named = _SPLIT.fullmatch(self.path.name)
        if self.settings.get("split.no", int) != 0 or named is None or int(named[2]) != count:
            raise self.settings.invalid(
                "split.no", f"a model in {count} files is named by the first: NAME-00001-of-{count:05d}.gguf"
            )
        return [self.path.with_name(f"{named[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(2, count + 1)]

    def parts(self) -> list[GgufPart]:
        """Its files, the first one first."""
        return [
            GgufPart(path, int(reader.data_offset), [int(tensor.data_offset) for tensor in reader.tensors])
            for path, reader in self._readers.items()
        ]

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost dimension first. Raises `MissingTensor`."""
        return tuple(int(size) for size in reversed(self._find(name).shape))

    def read(self, name: str, slices: Sequence[range] = ()) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantised to float32; with `slices`, these indices of the first dimensions (steps of 1): of the last
        dimension whole blocks are dequantised, and what is beyond the slice is cut off.

        Raises `MissingTensor`, `UnsupportedTensorType`."""
        tensor = self._find(name)
        dimensions = len(tensor.shape)
        index = [slice(part.start, part.stop) for part in slices] + [slice(None)] * (dimensions - len(slices))
        data, cut = tensor.data, slice(None)
        if len(slices) == dimensions and data.dtype == np.uint8:
            block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            first, stop = slices[-1].start // block, -(-slices[-1].stop // block)
            index[-1] = slice(first * size, stop * size)
            cut = slice(slices[-1].start - first * block, slices[-1].stop - first * block)
        try:
            values = gguf.dequantize(data[tuple(index)], tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedTensorType(name, tensor.tensor_type.name, self.path) from error
        # A tensor stored as float32 is a view of the read-only mapping; the copy is what torch may own.
        return np.array(values[..., cut], dtype=np.float32, copy=values.base is not None)

    def _find(self, name: str) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise MissingTensor(name, self.path)
        return tensor


def _open(path: Path) -> _HeaderReader:
    try:
        return _HeaderReader(path)
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path}: this file of the model is missing", path=path) from error
    except (ValueError, KeyError, IndexError, struct.error, OSError) as error:
        raise CheckpointUnreadable(f"{path}: not a readable GGUF file: {error}", path=path) from error


class GgufWeights(WeightSource):
    """The tensors of a GGUF file under Hugging Face names.

    `interleaved_rotary`: the converter reordered each head of the query and key projections so that the two
    dimensions that rotate together are neighbours (it does so for the llama architecture only); undone on reading.
    """

    def __init__(self, file: GgufFile, *, layers: int, heads: int, kv_heads: int, interleaved_rotary: bool) -> None:
        self.path = file.path
        self._file = file
        architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        if file.architecture not in architectures:
            raise InvalidConfig(f"{file.path}: the gguf library knows no architecture {file.architecture!r}")
        self._names = get_tensor_name_map(architectures[file.architecture], layers)
        self._heads = {"q": heads, "k": kv_heads} if interleaved_rotary else {}
        self._asked: set[str] = set()

    def __len__(self) -> int:
        return sum(self._file.shape(name)[0] if "_exps." in name else 1 for name in self._file)

    def __contains__(self, name: str) -> bool:
        try:
            self._place(name)
        except MissingTensor:
            return False
        return True

    def untouched(self) -> list[str]:
        """See `WeightSource.untouched`. llama.cpp refuses such files too."""
        return [name for name in self._file if name not in self._asked and not _WITHOUT_A_NAME.fullmatch(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        stored, outer = self._place(name)
        return self._file.shape(stored)[len(outer) :]

    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """See `WeightSource.read`."""
        stored, outer = self._place(name)
        rotated = _ROTATED.search(name)
        if rotated is None or rotated[1] not in self._heads:
            values = self._file.read(stored, [*outer, *slices])
            return torch.from_numpy(values.reshape(values.shape[len(outer) :]))
        # Reordered within each head, so whole heads are read.
        rows = self._file.shape(stored)[0]
        size, wanted = rows // self._heads[rotated[1]], slices[0] if slices else range(rows)
        first, stop = wanted.start // size * size, -(-wanted.stop // size) * size
        tensor = torch.from_numpy(self._file.read(stored, [range(first, stop), *slices[1:]]))
        pairs = tensor.view(-1, size // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)[wanted.start - first : wanted.stop - first]

    def _place(self, name: str) -> tuple[str, list[range]]:
        """The GGUF tensor that holds a tensor, and where in its first dimension. Raises `MissingTensor`."""
        # The experts of a layer are one tensor there, `[experts, rows, columns]`.
        expert = _EXPERT.search(name)
        outer = [] if expert is None else [range(int(expert[2]), int(expert[2]) + 1)]
        found = self._names.get_name(_EXPERT.sub(r"\1.", name), try_suffixes=(".weight", ".bias"))
        if found is None or found not in self._file:
            raise MissingTensor(name if found is None else f"{found} ({name})", self.path)
        if any(part.stop > self._file.shape(found)[0] for part in outer):
            raise MissingTensor(f"{found} ({name})", self.path)
        self._asked.add(str(found))
        return str(found), outer
