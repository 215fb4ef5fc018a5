"""Matrices of 8-bit floats with a factor for each block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from baton_model.block_fp8 import BlockFp8Weights, open_weights
from baton_model.errors import InvalidConfig, MissingTensor, UnsupportedTensorType, WrongShape
from baton_model.hugging_face import SafetensorsWeights
from baton_model.loaders import load_model
from block_fp8 import dequantise, quantise, to_block_fp8
from small_deepseek import SmallDeepseek

BLOCK = (4, 6)
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 6], "activation_scheme": "dynamic"}


def write(directory: Path, tensors: dict[str, torch.Tensor], **quantisation) -> Path:
    config = {"quantization_config": CONFIG | quantisation} if quantisation is not None else {}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), BLOCK)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> tuple[BlockFp8Weights, torch.Tensor]:
    """17 x 20: the last blocks are one row and two columns."""
    values, factors = matrix(17, 20)
    directory = write(tmp_path_factory.mktemp("fp8"), {"a.weight": values, "a.weight_scale_inv": factors})
    weights = open_weights(directory)
    assert isinstance(weights, BlockFp8Weights)
    return weights, dequantise(values, factors, BLOCK)


def ranges(size: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda x: x[0] < x[1]).map(lambda x: range(*x))


@settings(max_examples=100)
@given(ranges(17), ranges(20))
def test_slices_need_not_fall_on_the_edges_of_blocks(source, rows, columns):
    weights, expected = source
    wanted = expected[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(weights.read("a.weight", [rows, columns]), wanted)


def test_a_whole_matrix_and_whole_columns(source):
    weights, expected = source
    assert torch.equal(weights.read("a.weight"), expected)
    assert torch.equal(weights.read("a.weight", [range(3, 9)]), expected[3:9])
    assert len(weights) == 1 and weights.shape("a.weight") == (17, 20)


def test_tensors_of_other_types_are_read_as_they_are(tmp_path):
    norm = torch.randn(20, dtype=torch.bfloat16)
    assert torch.equal(open_weights(write(tmp_path, {"norm.weight": norm})).read("norm.weight"), norm)


def test_a_missing_or_misshapen_factor_is_named(tmp_path):
    values, factors = matrix(17, 20)
    tensors = {
        "a.weight": values,
        "b.weight": values.clone(),
        "b.weight_scale_inv": factors[:4].clone(),
        "c": values[0].clone(),
    }
    weights = open_weights(write(tmp_path, tensors))
    with pytest.raises(MissingTensor, match=r"a\.weight_scale_inv"):
        weights.read("a.weight")
    with pytest.raises(WrongShape, match=r"b\.weight_scale_inv' has shape \[4, 4\].*asks for \[5, 4\]"):
        weights.read("b.weight", [range(2)])
    with pytest.raises(UnsupportedTensorType, match="'c' is stored as F8_E4M3 of shape"):
        weights.read("c")


@pytest.mark.parametrize(
    ("quantisation", "complaint"),
    [
        ({"quant_method": "gptq"}, "'quant_method' is 'gptq'"),
        ({"fmt": "e5m2"}, "'fmt' is 'e5m2'"),
        ({"weight_block_size": [128]}, "'weight_block_size'"),
        ({"weight_block_size": None}, "'weight_block_size'"),
        ({"weight_block_size": [0, 128]}, "'weight_block_size'"),
    ],
)
def test_other_quantisations_are_refused(tmp_path, quantisation, complaint):
    with pytest.raises(InvalidConfig, match=complaint):
        open_weights(write(tmp_path, {"a": torch.zeros(1)}, **quantisation))


def test_without_a_quantisation_floats_of_8_bits_are_refused(tmp_path):
    values, _ = matrix(17, 20)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a.weight": values}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert type(weights) is SafetensorsWeights
    with pytest.raises(UnsupportedTensorType, match=r"a\.weight"):
        weights.read("a.weight")


def test_loading_reports_its_progress_up_to_the_end(tmp_path):
    directory = SmallDeepseek().write_hugging_face(tmp_path / "fp8")
    to_block_fp8(directory, tmp_path / "exact", BLOCK)
    assert any(name.endswith("_scale_inv") for name in load_file(directory / "model.safetensors"))
    progress: list[float] = []
    load_model(directory, "float32", progress=progress.append)
    assert progress == sorted(progress) and progress[-1] == 1.0
