"""Small random DeepSeek checkpoints, written by transformers, against transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from baton_model.loaders import load_model
from baton_model.parallel import SOLO, RankGroup
from block_fp8 import to_block_fp8
from paged_runner import PagedRunner
from rank_threads import on_ranks

TOLERANCE = 1e-4
VOCABULARY = 128

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
V2 = {
    "plain": {},
    "without a latent of queries": {"q_lora_rank": None},
    "many heads, wide values": {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 40},
    "three heads": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 12},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    "scaling, two shared experts": {"routed_scaling_factor": 1.7, "n_shared_experts": 2, "n_routed_experts": 5},
    "all layers with experts": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
    "no layer with experts": {"first_k_dense_replace": 3},
    "biases": {"attention_bias": True},
    "yarn as V2 has it": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "yarn without temperature of scores": {"rope_parameters": YARN | {"factor": 8.0}},
}
V3 = {
    "plain": {"n_group": 2, "topk_group": 1},
    "one group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 5},
    "four groups": {"n_group": 4, "topk_group": 3, "routed_scaling_factor": 2.5},
    "not normalised": {"n_group": 2, "topk_group": 2, "norm_topk_prob": False},
    "without a latent of queries": {"n_group": 2, "topk_group": 1, "q_lora_rank": None},
    "rotary halves": {"n_group": 2, "topk_group": 1, "rope_interleave": False},
    "yarn as V3 has it": {
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "two temperatures": {
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    },
}


def write_checkpoint(directory: Path, generation: str, shard: str = "1GB", **settings) -> torch.nn.Module:
    """A random model whose every parameter matters: norms, biases and corrections are away from their defaults."""
    torch.manual_seed(7)
    configure, kind = {
        "V2": (DeepseekV2Config, DeepseekV2ForCausalLM),
        "V3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    }[generation]
    model = kind(configure(**(COMMON | settings))).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "e_score_correction_bias")) or "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def expected_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    # A constant output would pass a comparison.
    assert logits.std(0).mean() > 0.1
    return logits


def run(directory: Path, ids: list[int], group: RankGroup = SOLO) -> torch.Tensor:
    """A prompt in two chunks, of which the second continues a page, and 32 decodes."""
    runner = PagedRunner(load_model(directory, "float32", group=group), pages=40, page_size=8)
    return runner.run("only", ids, [len(ids) - 50, 18, *[1] * 32])


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize(("generation", "variant"), [*(("V2", name) for name in V2), *(("V3", name) for name in V3)])
def test_prefill_and_decodes(tmp_path, generation, variant):
    settings = {"V2": V2, "V3": V3}[generation][variant]
    ids = tokens(220 if "yarn" in variant else 100)
    expected = expected_logits(write_checkpoint(tmp_path, generation, **settings), ids)
    assert (run(tmp_path, ids) - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize(("generation", "heads", "ranks"), [("V2", 4, 2), ("V3", 4, 3), ("V3", 8, 4), ("V2", 3, 3)])
def test_every_rank_has_the_logits_of_the_whole_model(tmp_path, generation, heads, ranks):
    """Sizes that divide by nothing: 101 words, 45 inner neurons, 7 experts."""
    write_checkpoint(
        tmp_path,
        generation,
        vocab_size=101,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        moe_intermediate_size=45,
        n_routed_experts=7,
        n_group=1,
        topk_group=1,
    )
    ids = [token % 101 for token in tokens(70)]
    whole = run(tmp_path, ids)
    found = on_ranks(ranks, lambda group: run(tmp_path, ids, group))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (found[0] - whole).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("generation", ["V2", "V3"])
def test_block_fp8(tmp_path, generation):
    """Blocks that neither the sizes nor the shares of three ranks are multiples of; transformers has the same weights
    in float32."""
    model = write_checkpoint(tmp_path / "fp8", generation, n_group=2, topk_group=1)
    to_block_fp8(tmp_path / "fp8", tmp_path / "exact", (20, 12))
    ids = tokens(70)
    expected = expected_logits(type(model).from_pretrained(tmp_path / "exact"), ids)
    assert (expected - expected_logits(model, ids)).abs().max() > 10 * TOLERANCE
    assert (run(tmp_path / "fp8", ids) - expected).abs().max().item() < TOLERANCE
    for found in on_ranks(3, lambda group: run(tmp_path / "fp8", ids, group)):
        assert (found - expected).abs().max().item() < TOLERANCE


def test_bfloat16_errs_no_more_than_transformers_does(tmp_path):
    exact_model = write_checkpoint(tmp_path, "V3", n_group=2, topk_group=1)
    rounded_model = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = tokens(100)
    exact = expected_logits(exact_model, ids)
    rounded = expected_logits(rounded_model, ids).float()
    found = PagedRunner(load_model(tmp_path, "bfloat16"), pages=40, page_size=8).run("only", ids, [40, *[1] * 20])
    assert (found - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()
