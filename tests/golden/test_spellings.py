"""config.json as people edit it and as libraries old and new write it: what transformers makes of it, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from baton_model.errors import InvalidConfig
from baton_model.loaders import load_config, load_model
from paged_runner import PagedRunner

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 64, (96,), generator=torch.Generator().manual_seed(3)).tolist()
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
OWN = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3_moe": EXPERTS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
STRETCHED = {"rope_theta": 500.0, "factor": 4.0, "rope_type": "yarn", "original_max_position_embeddings": 16}


def written(directory: Path, family: str, edits: dict, **settings) -> Path:
    """A checkpoint that transformers saved, and then these settings in place of those in its config.json."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(COMMON | OWN[family] | settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edits))
    return directory


def expected(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert logits.std(0).mean() > 0.1
    return logits


def found(directory: Path) -> torch.Tensor:
    runner = PagedRunner(load_model(directory, "float32"), pages=16, page_size=8)
    return runner.run("only", TOKENS, [47, 17, *[1] * 32])


@pytest.mark.parametrize(
    ("family", "edits"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0}),
        ("qwen2", {"rope_parameters": {}, "rope_theta": 500.0}),
        ("llama", {"rope_parameters": None, "rope_scaling": {}, "rope_theta": 500.0}),
        ("llama", {"rope_parameters": STRETCHED, "original_max_position_embeddings": 64}),
        ("deepseek_v3", {"rope_parameters": STRETCHED | {"rope_type": "linear", "mscale_all_dim": 1.0}}),
        ("deepseek_v3", {"rope_parameters": STRETCHED | {"rope_type": "dynamic", "mscale_all_dim": 1.0}}),
        ("deepseek_v3", {"rope_interleave": None}),
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}),
    ],
)
def test_settings_mean_what_they_mean_to_transformers(tmp_path, family, edits):
    directory = written(tmp_path, family, edits)
    right = expected(directory)
    assert (found(directory) - right).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("shared", [0, 2])
def test_shared_experts_or_none(tmp_path, family, shared):
    directory = written(tmp_path, family, {}, n_shared_experts=shared)
    assert (found(directory) - expected(directory)).abs().max().item() < TOLERANCE


def test_a_tied_model_whose_file_has_another_head_uses_that(tmp_path):
    directory = written(tmp_path, "llama", {"tie_word_embeddings": True})
    assert (found(directory) - expected(directory)).abs().max().item() < TOLERANCE
    state = load_file(directory / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    copied = found(directory)
    assert (copied - expected(directory)).abs().max().item() < TOLERANCE
    del state["lm_head.weight"]
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(found(directory), copied)


@pytest.mark.parametrize(
    ("family", "edits", "named"),
    [
        # transformers has the window in every layer of this family, whatever else is said.
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, "sliding_window"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2},
            "slid",
        ),
        # 4,096 tokens where nothing is said.
        ("qwen3_moe", {"use_sliding_window": True, "max_position_embeddings": 8192, "sliding_window": 4096}, "sliding"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "full_attention"),
        ("llama", {"rope_parameters": STRETCHED | {"beta_fast": 0}}, "beta_fast"),
        ("llama", {"rope_parameters": STRETCHED | {"beta_slow": -1.0}}, "beta_slow"),
        ("llama", {"rope_parameters": STRETCHED | {"rope_theta": 1.0}}, "rope_theta"),
        ("llama", {"rope_parameters": STRETCHED | {"rope_type": "llama3", "low_freq_factor": 8.0}}, "high_freq_factor"),
        ("llama", {"rope_parameters": STRETCHED | {"rope_type": "dynamic", "factor": None}}, "factor"),
        ("llama", {"rope_parameters": None, "rope_theta": float("nan")}, "rope_theta"),
        ("llama", {"rope_parameters": None, "rope_theta": -5.0}, "rope_theta"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("llama", {"vocab_size": 10**12}, "vocab_size"),
        ("llama", {"head_dim": 10**6}, "head_dim"),
        ("qwen3_moe", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ("deepseek_v3", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        # transformers adds the bias of a block without neurons.
        ("deepseek_v2", {"n_shared_experts": 0, "mlp_bias": True}, "n_shared_experts"),
    ],
)
def test_what_would_give_other_logits_is_refused_by_name(tmp_path, family, edits, named):
    with pytest.raises(InvalidConfig, match=named):
        load_config(written(tmp_path, family, edits))


def test_a_window_that_nobody_gave_a_size_has_that_of_transformers(tmp_path):
    directory = written(tmp_path, "qwen2", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["sliding_window"]
    for context, refused in ((4096, False), (4097, True)):
        path.write_text(json.dumps(config | {"max_position_embeddings": context}))
        if refused:
            with pytest.raises(InvalidConfig, match="here 4096 tokens"):
                load_config(directory)
        else:
            assert load_config(directory).context_length == context
