"""Turns a checkpoint into a block-FP8 one, and knows what must be read from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# What the published checkpoints leave in higher precision.
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias", "eh_proj")


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit values and factors, block by block: the largest element of each becomes the type's largest, 448."""
    height, width = block
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-rows // height), -(-columns // width))
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            factors[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / factors[i, j]).to(torch.float8_e4m3fn)
    return values, factors


def dequantise(values: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element."""
    rows = torch.arange(values.shape[0]) // block[0]
    columns = torch.arange(values.shape[1]) // block[1]
    return values.to(torch.float32) * factors[rows][:, columns]


def to_block_fp8(directory: Path, exact: Path, block: tuple[int, int]) -> None:
    """Quantises the checkpoint in `directory` in place, and writes into `exact` what it stands for, in float32."""
    config = json.loads((directory / "config.json").read_text())
    state = load_file(directory / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in state.items():
        if tensor.ndim != 2 or any(part in name for part in KEPT):
            stored[name] = meant[name] = tensor
            continue
        values, factors = quantise(tensor, block)
        stored[name], stored[f"{name}_scale_inv"] = values, factors
        meant[name] = dequantise(values, factors, block)
    exact.mkdir()
    (exact / "config.json").write_text(json.dumps(config))
    save_file(meant, exact / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
