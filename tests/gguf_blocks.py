"""Blocks of GGUF's k-quantised types, at random, and what they stand for: the library only reads these types.

One value at a time, after the `dequantize_row_*` functions of ggml's `ggml-quants.c`.
"""

from __future__ import annotations

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
BLOCK = 256


def random_blocks(kind: Kind, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Uint8 `[rows, bytes of a row]`; the scales are small positive numbers."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (rows, columns // BLOCK, size), dtype=np.uint8)
    scales = random.uniform(1e-4, 1e-2, (rows, columns // BLOCK, 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[..., -2:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(rows, -1)


def values(kind: Kind, data: np.ndarray) -> np.ndarray:
    """Float64 `[rows, columns]` of `random_blocks`."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    read = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}[kind]
    return np.array([[value for at in range(0, len(row), size) for value in read(row[at : at + size])] for row in data])


def _half(data: np.ndarray) -> float:
    return float(data.view(np.float16)[0])


def _scale_and_minimum(packed: list[int], j: int) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def _q4_k(block: np.ndarray) -> list[float]:
    return _with_minimums(block, [0] * 32, block[16:].tolist())


def _q5_k(block: np.ndarray) -> list[float]:
    return _with_minimums(block, block[16:48].tolist(), block[48:].tolist())


def _with_minimums(block: np.ndarray, fifth_bits: list[int], nibbles: list[int]) -> list[float]:
    d, minimum, packed = _half(block[:2]), _half(block[2:4]), block[4:16].tolist()
    result = []
    for part in range(8):
        scale, offset = _scale_and_minimum(packed, part)
        for i in range(32):
            nibble = nibbles[part // 2 * 32 + i] >> part % 2 * 4 & 15
            result.append(d * scale * (nibble + 16 * (fifth_bits[i] >> part & 1)) - minimum * offset)
    return result


def _q6_k(block: np.ndarray) -> list[float]:
    low, high = block[:128].tolist(), block[128:192].tolist()
    scales, d = block[192:208].view(np.int8).tolist(), _half(block[208:])
    result = []
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                bits = low[half * 64 + quarter % 2 * 32 + i] >> quarter // 2 * 4 & 15
                bits |= (high[half * 32 + i] >> quarter * 2 & 3) << 4
                result.append(d * scales[half * 8 + quarter * 2 + i // 16] * (bits - 32))
    return result
