"""Checkpoints whose matrices are stored as 8-bit floats with a factor for each block, as DeepSeek publishes V3 and R1
and others their models after them (DeepSeek-AI, 2024: DeepSeek-V3, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .errors import UnsupportedTensorType, WrongShape
from .hugging_face import SafetensorsWeights, read_config
from .settings import Settings

SCALE_SUFFIX = "_scale_inv"
STORED = "F8_E4M3"


def open_weights(directory: Path) -> SafetensorsWeights:
    """The weights of a Hugging Face directory, as its `quantization_config` says they are stored.

    Raises `InvalidConfig` for another quantisation, `CheckpointNotFound`, `CheckpointUnreadable`.
    """
    settings = read_config(directory).section("quantization_config")
    return SafetensorsWeights(directory) if settings is None else BlockFp8Weights(directory, _block(settings))


def _block(settings: Settings) -> tuple[int, int]:
    if settings.get("quant_method", str) != "fp8":
        raise settings.invalid("quant_method", "of quantised checkpoints only those with 'fp8' can be read")
    if settings.get("fmt", str, "e4m3") != "e4m3":
        raise settings.invalid("fmt", "it must be 'e4m3'")
    block = settings.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise settings.invalid("weight_block_size", "it must be the rows and columns of a block")
    return block[0], block[1]


class BlockFp8Weights(SafetensorsWeights):
    """Dequantises on reading: element [i, j] of an 8-bit matrix is multiplied by `[i // rows, j // columns]` of the
    tensor of the same name with `_scale_inv` behind it. Blocks at the far edges may be cut; slices may begin and end
    anywhere. Tensors of other types are read as they are.
    """

    def __init__(self, directory: Path, block: tuple[int, int]) -> None:
        super().__init__(directory)
        self.block = block

    def __len__(self) -> int:
        return sum(not name.endswith(SCALE_SUFFIX) for name in self.names())

    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """See `WeightSource.read`. Raises `MissingTensor` and `WrongShape` of the factors too."""
        if self.stored_type(name) != STORED:
            return super().read(name, slices)
        shape = self.shape(name)
        if len(shape) != 2:
            raise UnsupportedTensorType(name, f"{STORED} of shape {list(shape)}", self.path)
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        if self.shape(name + SCALE_SUFFIX) != blocks:
            raise WrongShape(name + SCALE_SUFFIX, blocks, self.shape(name + SCALE_SUFFIX), self.path)
        rows, columns = [*slices, *(range(size) for size in shape[len(slices) :])]
        height, width = self.block
        scales = self.stored(
            name + SCALE_SUFFIX,
            [
                range(rows.start // height, -(-rows.stop // height)),
                range(columns.start // width, -(-columns.stop // width)),
            ],
        ).to(torch.float32)
        first = columns.start % width
        scales = scales.repeat_interleave(width, 1)[:, first : first + len(columns)]
        result = self.stored(name, [rows, columns]).to(torch.float32)
        # One row of blocks after the other: factors for every element would be as large as the matrix.
        for number, factors in enumerate(scales, rows.start // height):
            top = max(number * height - rows.start, 0)
            result[top : (number + 1) * height - rows.start] *= factors
        return result
