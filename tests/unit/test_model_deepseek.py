"""DeepSeek's models as their callers see them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from baton_model.cache import CacheShape
from baton_model.config import ExpertsConfig, LatentConfig
from baton_model.errors import InvalidBatch
from baton_model.layers.rotary import attention_factor, softmax_temperature
from baton_model.loaders import load_config, load_model
from paged_runner import PagedRunner
from small_deepseek import SmallDeepseek
from small_models import SmallModel

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

# What the published config.json files say, as far as it has a meaning here.
R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def test_the_published_configuration_of_r1(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(R1))
    config = load_config(tmp_path)
    assert (config.family, config.kv_heads, config.head_dim, config.mtp_layers) == ("deepseek_v3", 1, 576, 1)
    assert config.latent == LatentConfig(512, 64, 128, 128, 1536, interleaved_rotary=True)
    assert config.experts == ExpertsConfig(
        256, 8, 2048, True, frozenset(range(3, 62)), 2048, groups=8, active_groups=4, scaling=2.5, scoring="sigmoid"
    )
    assert attention_factor(config.rope) == 1.0
    assert math.isclose(softmax_temperature(config.rope), (0.1 * math.log(40) + 1) ** 2)


def test_the_published_configuration_of_v2_lite(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    config = load_config(tmp_path)
    assert (config.family, config.kv_heads, config.head_dim, config.mtp_layers) == ("deepseek_v2", 1, 576, 0)
    assert config.latent == LatentConfig(512, 64, 128, 128, None, interleaved_rotary=True)
    assert config.experts == ExpertsConfig(64, 6, 1408, False, frozenset(range(1, 27)), 2 * 1408)
    assert attention_factor(config.rope) == 1.0
    assert math.isclose(softmax_temperature(config.rope), (0.0707 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize("generation", [2, 3])
def test_sequences_in_one_batch_are_computed_as_each_by_itself(tmp_path, generation):
    """A long chunk, which expands, a short one behind a context, which absorbs, and decodes, which go together."""
    model = load_model(SmallDeepseek(generation=generation).write_hugging_face(tmp_path), "float32")
    steps = [
        {"a": [5] * 30 + [7], "b": [1, 2, 3]},
        {"b": [4], "a": [9, 8, 7], "c": list(range(40))},
        {"c": [1], "a": [2], "b": [3]},
    ]
    together, alone = PagedRunner(model, 20, page_size=8), PagedRunner(model, 20, page_size=8, seed=1)
    for step in steps:
        found = together.step(step)
        for name, tokens in step.items():
            torch.testing.assert_close(found[name], alone.step({name: tokens})[name], atol=1e-5, rtol=1e-4)


def test_layers_are_reported_once_their_entries_are_in_the_pages(tmp_path):
    runner = PagedRunner(load_model(SmallDeepseek().write_hugging_face(tmp_path), "float32"), pages=2)
    filled: list[list[int]] = []

    def on_layer(layer: int) -> None:
        filled.append(runner.cache.tensor.flatten(1).count_nonzero(1).tolist())

    runner.step({"only": [1, 2, 3]}, on_layer)
    assert filled == [[60, 0, 0], [60, 60, 0], [60, 60, 60]]


def test_a_cache_of_another_kind_is_refused(tmp_path):
    latent = load_model(SmallDeepseek(layers=2).write_hugging_face(tmp_path / "a"), "float32")
    other = load_model(SmallModel().write_hugging_face(tmp_path / "b"), "float32")
    assert latent.cache_shape == CacheShape(2, 1, 20, latent=True)
    for model, stranger in ((latent, other), (other, latent)):
        runner = PagedRunner(stranger, pages=1)
        runner.model = model
        with pytest.raises(InvalidBatch, match=r"the cache has 2 layers of .* the rank needs 2 layers of"):
            runner.step({"only": [1]})
        assert not runner.cache.tensor.any()


def test_eight_bits_stay_close(tmp_path):
    directory = SmallDeepseek(hidden=64, expert_inner=64).write_hugging_face(tmp_path)
    tokens = list(range(40))
    exact = PagedRunner(load_model(directory, "float32"), 6).run("only", tokens, [])
    rounded = PagedRunner(load_model(directory, "float32", quantization="int8"), 6).run("only", tokens, [])
    assert 0 < (rounded - exact).abs().mean() < 0.15 * exact.std()


def test_progress_ends_at_the_whole_even_if_modules_are_left_out(tmp_path):
    progress: list[float] = []
    load_model(SmallDeepseek(mtp=1).write_hugging_face(tmp_path), "float32", progress=progress.append)
    assert progress == sorted(progress) and progress[-1] == 1.0
