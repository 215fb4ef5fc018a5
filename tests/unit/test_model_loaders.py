"""From files to models: both formats say the same, and every defect has a name."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from baton_model.errors import (
    CheckpointNotFound,
    CheckpointUnreadable,
    InvalidConfig,
    MissingTensor,
    UnknownFamily,
    UnknownTensor,
    UnsupportedTensorType,
    WrongShape,
)
from baton_model.fingerprint import fingerprint
from baton_model.gguf_file import GgufFile, GgufWeights
from baton_model.loaders import load_config, load_model
from paged_runner import PagedRunner
from small_models import SmallModel

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]
Kind = gguf.GGMLQuantizationType


def logits(path) -> torch.Tensor:
    return PagedRunner(load_model(path, "float32"), pages=4, page_size=8).run("only", TOKENS, [7])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_give_the_same_model(tmp_path, family, tied, bias):
    small = SmallModel(family=family, tied=tied, bias=bias)
    single = logits(small.write_hugging_face(tmp_path / "single"))
    assert torch.equal(logits(small.write_hugging_face(tmp_path / "sharded", shards=3)), single)
    torch.testing.assert_close(logits(small.write_gguf(tmp_path / "small.gguf")), single)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_give_the_same_config(tmp_path, family):
    small = SmallModel(family=family)
    from_directory = load_config(small.write_hugging_face(tmp_path / "hf", eos_token_id=2))
    from_file = load_config(small.write_gguf(tmp_path / "small.gguf"))
    assert from_file.rms_norm_eps == pytest.approx(from_directory.rms_norm_eps)
    for name in from_directory.__dataclass_fields__.keys() - {"rms_norm_eps"}:
        assert getattr(from_file, name) == getattr(from_directory, name), name


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"type": "linear", "factor": 2.0}),
        # What llama.cpp reads where no type is written, and under the older name.
        ({"rope__scaling__factor": 2.0}, {"type": "linear", "factor": 2.0}),
        ({"rope__scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_of_gguf_and_of_older_config_files(tmp_path, stored, loaded):
    small = SmallModel()
    expected = logits(small.write_hugging_face(tmp_path / "hf", rope_scaling=loaded))
    torch.testing.assert_close(logits(small.write_gguf(tmp_path / "small.gguf", **stored)), expected)
    plain = logits(small.write_hugging_face(tmp_path / "plain"))
    assert (plain - expected).abs().max() > 1e-3


def test_gguf_stores_llama3_scaling_as_divisors(tmp_path):
    small = SmallModel()
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    divisors = []
    for i in range(small.head_dim // 2):
        # As in llama.cpp's converter.
        wavelength = 2 * np.pi * 10_000.0 ** (2 * i / small.head_dim)
        smooth = (64 / wavelength - 1) / 3
        divisors.append(1 if wavelength < 16 else 8 if wavelength > 64 else 1 / ((1 - smooth) / 8 + smooth))
    assert len(set(divisors)) > 2
    path = small.write_gguf(tmp_path / "small.gguf", extra={"rope_freqs.weight": np.array(divisors, dtype=np.float32)})
    torch.testing.assert_close(logits(path), logits(small.write_hugging_face(tmp_path / "hf", rope_scaling=scaling)))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_gguf_tensor_types(tmp_path, kind):
    small = SmallModel()
    file = GgufFile(small.write_gguf(tmp_path / "small.gguf", kind))
    source = GgufWeights(file, layers=2, heads=4, kv_heads=2, interleaved_rotary=True)
    assert len(source) == len(small.state)
    for name, expected in small.state.items():
        assert name in source
        assert source.shape(name) == expected.shape
        step = np.ptp(expected) / {Kind.F32: np.inf, Kind.F16: 1e3, Kind.BF16: 100, Kind.Q8_0: 200}.get(kind, 12)
        assert np.abs(source.read(name).numpy() - expected).max() <= step


def test_the_quick_header_reader_agrees_with_the_library(tmp_path):
    words = ["", "a", "ä" * 300, "\n"]
    path = SmallModel().write_gguf(tmp_path / "small.gguf", vocabulary=words)
    quick, library = GgufFile(path), gguf.GGUFReader(path)
    (part,) = quick.parts()
    assert part.data_offset == library.data_offset
    assert part.tensor_offsets == [tensor.data_offset for tensor in library.tensors]
    for name, field in library.fields.items():
        if name == "tokenizer.ggml.tokens":
            assert name not in quick.metadata
        else:
            assert quick.metadata[name] == field.contents(), name


def test_progress_is_told_up_to_the_end(tmp_path):
    seen: list[float] = []
    load_model(SmallModel().write_hugging_face(tmp_path), "bfloat16", progress=seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 21
    assert seen[-1] == 1.0


def test_a_missing_tensor_is_named(tmp_path):
    small = SmallModel()
    del small.state["model.layers.1.mlp.up_proj.weight"]
    for path in (small.write_hugging_face(tmp_path / "hf"), small.write_gguf(tmp_path / "small.gguf")):
        with pytest.raises(MissingTensor, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as error:
            load_model(path, "float32")
        assert error.value.status == "FAILED_PRECONDITION"
        assert error.value.reason == "MODEL_MISSING_TENSOR"
        assert "up_proj" in error.value.fields["tensor"]


def test_an_untied_model_without_a_head(tmp_path):
    with pytest.raises(MissingTensor, match="lm_head"):
        load_model(SmallModel(tied=True).write_hugging_face(tmp_path, tie_word_embeddings=False), "float32")


def test_a_tensor_that_the_index_promises_and_no_shard_has(tmp_path):
    small = SmallModel()
    directory = small.write_hugging_face(tmp_path, shards=2)
    shard = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]["model.norm.weight"]
    kept = {n: t for i, (n, t) in enumerate(small.state.items()) if i % 2 == int(shard[5]) and n != "model.norm.weight"}
    save_file(kept, directory / shard)
    with pytest.raises(MissingTensor, match=r"model\.norm\.weight"):
        load_model(directory, "float32")
    (directory / shard).unlink()
    with pytest.raises(CheckpointNotFound, match=shard):
        load_model(directory, "float32")


def test_a_wrong_shape_is_named(tmp_path):
    small = SmallModel()
    small.state["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 32), dtype=np.float32)
    with pytest.raises(WrongShape, match=r"k_proj.*\[16, 32\].*\[32, 32\]") as error:
        load_model(small.write_hugging_face(tmp_path), "float32")
    assert error.value.fields["expected"] == "[32, 32]"
    assert error.value.fields["found"] == "[16, 32]"


def test_an_integer_tensor_is_refused(tmp_path):
    small = SmallModel()
    small.state["model.norm.weight"] = np.ones(32, dtype=np.int32)
    with pytest.raises(UnsupportedTensorType, match=r"model\.norm\.weight.*int32"):
        load_model(small.write_hugging_face(tmp_path), "float32")


def test_an_unknown_family_is_named_beside_the_known_ones(tmp_path):
    small = SmallModel()
    directory = small.write_hugging_face(tmp_path / "hf", architectures=["MambaForCausalLM"])
    with pytest.raises(UnknownFamily, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        load_config(directory)
    with pytest.raises(UnknownFamily, match=r"mamba.*llama"):
        load_config(small.write_gguf(tmp_path / "small.gguf", architecture="mamba"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": []}, "architectures"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_bad_setting_is_named(tmp_path, settings, complaint):
    with pytest.raises(InvalidConfig, match=complaint):
        load_config(SmallModel().write_hugging_face(tmp_path, **settings))


def test_a_real_number_may_be_written_as_an_integer_of_any_size(tmp_path):
    small = SmallModel().write_hugging_face(tmp_path, rope_parameters={"rope_theta": 10**10})
    assert load_config(small).rope.theta == 1e10


@pytest.mark.parametrize(
    ("family", "settings", "complaint"),
    [
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "through 7 experts, of which there are 6"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, "slid"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 127}, "sliding_window"),
    ],
)
def test_a_bad_setting_of_a_family_is_named(tmp_path, family, settings, complaint):
    with pytest.raises(InvalidConfig, match=complaint):
        load_config(SmallModel(family=family).write_hugging_face(tmp_path, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
    ],
)
def test_a_window_that_changes_nothing_is_let_pass(tmp_path, settings):
    assert load_config(SmallModel(family="qwen3").write_hugging_face(tmp_path, **settings)).layers == 2


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention__sliding_window": 64}, "sliding_window"),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "rope.scaling.type"),
        ({"rope__scaling__factor": -2.0}, "rope.scaling.factor"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_ext_factor": 0.0},
            "yarn_ext",
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_beta_slow": 0.0},
            "beta_slow",
        ),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon"),
        ({"rope__freq_base": 0.0}, "freq_base"),
    ],
)
def test_gguf_that_this_reader_would_read_wrongly_is_refused(tmp_path, metadata, named):
    with pytest.raises(InvalidConfig, match=named):
        load_config(SmallModel(family="qwen3").write_gguf(tmp_path / "window.gguf", **metadata))


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.1.attn_q.bias", "blk.2.attn_norm.weight"])
def test_a_tensor_of_gguf_that_the_model_has_no_place_for_is_named(tmp_path, name):
    """As llama.cpp does: a bias that is passed over, for example, is another model. Of Hugging Face directories
    transformers passes over what it doesn't know."""
    path = SmallModel().write_gguf(tmp_path / "small.gguf", extra={name: np.ones(32, np.float32)})
    with pytest.raises(UnknownTensor, match=name):
        load_model(path, "float32")
    without_effect = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    load_model(SmallModel().write_gguf(tmp_path / "other.gguf", extra=without_effect), "float32")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"intermediate_size": 2**31 - 1}),
        ("llama", {"vocab_size": 2**31 - 1}),
        ("llama", {"hidden_size": 2**31 - 1}),
        ("llama", {"num_attention_heads": 2**30}),
        ("qwen3_moe", {"num_experts": 2**31 - 1}),
        ("qwen3_moe", {"moe_intermediate_size": 2**31 - 1}),
    ],
)
def test_no_room_is_made_for_what_is_not_there(tmp_path, family, settings):
    with pytest.raises(WrongShape):
        load_model(SmallModel(family=family).write_hugging_face(tmp_path, **settings), "float32")


def test_a_gguf_model_in_several_files(tmp_path):
    small = SmallModel(family="qwen3_moe")
    (tmp_path / "parts").mkdir()
    first = small.write_gguf(tmp_path / "parts" / "small.gguf", file_tensors=9)
    assert first.name == "small-00001-of-00003.gguf"
    others = sorted(first.parent.iterdir())[1:]
    assert torch.equal(logits(first), logits(small.write_gguf(tmp_path / "whole.gguf")))
    assert fingerprint(first) != fingerprint(tmp_path / "whole.gguf")

    with pytest.raises(InvalidConfig, match=r"named by the first: NAME-00001-of-00003\.gguf"):
        load_config(others[0])
    before = fingerprint(first)
    whole = others[1].read_bytes()
    others[1].write_bytes(whole + bytes(32))
    assert fingerprint(first) != before
    others[1].write_bytes(whole[:-100])
    with pytest.raises(CheckpointUnreadable, match=others[1].name):
        load_config(first)
    others[1].unlink()
    with pytest.raises(CheckpointNotFound, match=others[1].name):
        load_config(first)
    others[0].rename(others[1])
    SmallModel(seed=1).write_gguf(others[0])
    with pytest.raises(CheckpointUnreadable, match="tensors; it says"):
        load_config(first)


def test_the_experts_of_gguf_are_one_tensor(tmp_path):
    small = SmallModel(family="qwen3_moe", layers=1)
    file = GgufFile(small.write_gguf(tmp_path / "small.gguf"))
    assert file.shape("blk.0.ffn_up_exps.weight") == (6, 32, 32)
    source = GgufWeights(file, layers=1, heads=4, kv_heads=2, interleaved_rotary=False)
    assert len(source) == len(small.state)
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in source
    with pytest.raises(MissingTensor, match=r"experts\.6\.up_proj"):
        source.shape("model.layers.0.mlp.experts.6.up_proj.weight")


def test_a_missing_expert_is_named(tmp_path):
    small = SmallModel(family="qwen3_moe")
    del small.state["model.layers.1.mlp.experts.4.down_proj.weight"]
    with pytest.raises(MissingTensor, match=r"layers\.1\.mlp\.experts\.4\.down_proj"):
        load_model(small.write_hugging_face(tmp_path / "hf"), "float32")


def test_a_truncated_shard_is_named(tmp_path):
    directory = SmallModel().write_hugging_face(tmp_path, shards=2)
    whole = (directory / "part-1.safetensors").read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        (directory / "part-1.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointUnreadable, match=r"part-1\.safetensors"):
            load_model(directory, "float32")


def test_what_is_no_checkpoint(tmp_path):
    small = SmallModel()
    with pytest.raises(CheckpointNotFound):
        load_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        load_config(tmp_path)
    whole = small.write_gguf(tmp_path / "whole.gguf").read_bytes()
    for length in (0, 3, 20, 200, len(whole) - 100):
        part = tmp_path / f"{length}.gguf"
        part.write_bytes(whole[:length])
        with pytest.raises(CheckpointUnreadable, match=part.name):
            load_config(part)
    directory = small.write_hugging_face(tmp_path / "hf")
    (directory / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(CheckpointUnreadable, match=r"model\.safetensors"):
        load_model(directory, "float32")
    with pytest.raises(CheckpointUnreadable, match=r"model\.safetensors"):
        fingerprint(directory)
    for text in ("{", "[" * 100_000):
        (directory / "config.json").write_text(text)
        with pytest.raises(CheckpointUnreadable, match=r"config\.json"):
            load_config(directory)
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointUnreadable, match=r"config\.json"):
        load_config(directory)


def test_an_index_that_names_a_directory(tmp_path):
    directory = SmallModel().write_hugging_face(tmp_path, shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = ""
    path.write_text(json.dumps(index))
    for read in (lambda: load_model(directory, "float32"), lambda: fingerprint(directory)):
        with pytest.raises(CheckpointUnreadable, match="not a readable safetensors file"):
            read()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(InvalidConfig, match=dtype):
        load_model(SmallModel().write_hugging_face(tmp_path), dtype)


def test_a_fingerprint_is_of_the_model_not_of_its_place(tmp_path):
    small = SmallModel()
    path, directory = small.write_gguf(tmp_path / "a.gguf"), small.write_hugging_face(tmp_path / "hf", shards=2)
    shutil.copy(path, tmp_path / "b.gguf")
    shutil.copytree(directory, tmp_path / "copy")
    assert fingerprint(path) == fingerprint(tmp_path / "b.gguf")
    assert fingerprint(directory) == fingerprint(tmp_path / "copy")


def test_fingerprints_differ_where_models_do(tmp_path):
    found = {
        fingerprint(small.write_hugging_face(tmp_path / f"{i}", **settings))
        for i, (small, settings) in enumerate(
            [
                (SmallModel(), {}),
                (SmallModel(seed=1), {}),
                (SmallModel(), {"rope_theta": 500.0}),
                (SmallModel(tied=True), {}),
            ]
        )
    }
    found |= {fingerprint(SmallModel(seed=seed).write_gguf(tmp_path / f"{seed}.gguf")) for seed in (0, 1)}
    assert len(found) == 6
