"""Small random Llama checkpoints, written by transformers, against transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton_model.loaders import load_config, load_model
from paged_runner import PagedRunner

TOLERANCE = 1e-4
VOCABULARY = 128

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
}


def write_checkpoint(directory: Path, shard: str | int = "1GB", **settings) -> LlamaForCausalLM:
    """A random model whose every parameter matters: norms and biases too are away from their defaults."""
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "initializer_range": 0.15,
            **settings,
        }
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def check(directory: Path, model: LlamaForCausalLM, tokens: list[int]) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    # A constant output would pass a comparison.
    assert expected.std(0).mean() > 0.1
    for order in ("HND", "NHD"):
        runner = PagedRunner(load_model(directory, "float32"), pages=30, page_size=8, order=order)
        found = runner.run("only", tokens, [len(tokens) - 50, 17, *[1] * 32])
        assert (found - expected).abs().max().item() < TOLERANCE


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, None), (8, 2, None), (4, 1, 24), (4, 2, 32), (8, 8, 8), (16, 4, 12)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_head_counts(tmp_path, heads, kv_heads, head_dim, tied):
    model = write_checkpoint(
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    check(tmp_path, model, tokens(100))


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling(tmp_path, kind):
    check(tmp_path, write_checkpoint(tmp_path, rope_parameters=ROPE[kind]), tokens(128))


def test_biases(tmp_path):
    model = write_checkpoint(tmp_path, attention_bias=True, mlp_bias=True, num_key_value_heads=2)
    config = load_config(tmp_path)
    assert config.attention_bias and config.mlp_bias
    check(tmp_path, model, tokens(60))


def test_shards_with_an_index(tmp_path):
    model = write_checkpoint(tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path, model, tokens(60))


def test_a_checkpoint_stored_in_bfloat16_runs_in_float32(tmp_path):
    write_checkpoint(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    check(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tokens(60))


def test_bfloat16_errs_no_more_than_transformers_does(tmp_path):
    exact_model = write_checkpoint(tmp_path, num_key_value_heads=2)
    rounded_model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = tokens(100)
    with torch.inference_mode():
        exact = exact_model(torch.tensor([ids])).logits[0]
        rounded = rounded_model(torch.tensor([ids])).logits[0].float()
    found = PagedRunner(load_model(tmp_path, "bfloat16"), pages=30, page_size=8).run("only", ids, [40, *[1] * 20])
    assert (found - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()
