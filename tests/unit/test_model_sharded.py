"""A model over several ranks is the model on one, and every rank reads its share and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton_kv.shards import ShardingImpossible
from baton_model.errors import InvalidConfig
from baton_model.loaders import load_config, load_model
from baton_model.parallel import SOLO, RankGroup
from baton_model.shares import even_share, head_share, neuron_share, word_share
from memory_weights import AbsentRank
from paged_runner import PagedRunner
from rank_threads import on_ranks
from small_models import SmallModel

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def logits(path: Path, group: RankGroup = SOLO, order: str = "HND") -> torch.Tensor:
    return PagedRunner(load_model(path, "float32", group=group), 4, page_size=8, order=order).run("only", TOKENS, [7])


# Sizes that divide by nothing: 67 words, 50 neurons.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(4, 4, 2), (4, 4, 3), (6, 3, 2), (8, 2, 2), (8, 2, 4), (6, 2, 4), (4, 1, 3), (5, 5, 4), (7, 1, 2), (8, 8, 4)],
)
@pytest.mark.parametrize("form", ["hugging face", "gguf"])
def test_every_rank_has_the_logits_of_the_whole_model(tmp_path, heads, kv_heads, ranks, form):
    small = SmallModel(heads=heads, kv_heads=kv_heads, vocabulary=67, inner=50, tied=heads % 2 == 0, bias=heads > 4)
    path = small.write_hugging_face(tmp_path / "hf") if form != "gguf" else small.write_gguf(tmp_path / "small.gguf")
    whole = logits(path)
    for order in ("HND", "NHD"):
        found = on_ranks(ranks, lambda group, order=order: logits(path, group, order))
        assert all(torch.equal(found[0], other) for other in found[1:])
        torch.testing.assert_close(found[0], whole, atol=1e-5, rtol=1e-4)


QWEN3_CODER_480B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "max_window_layers": 62,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_shares_of_a_model_of_full_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_CODER_480B))
    config = load_config(tmp_path)
    assert config.experts is not None and config.experts.layers == set(range(62)) and config.experts.normalised
    assert config.rope.theta == 1e7
    for ranks, kv_heads, queries, experts in ((8, 1, 12, 20), (16, 1, 6, 10), (3, 3, 36, 54)):
        first = AbsentRank(0, ranks)
        heads = head_share(config.heads, config.kv_heads, first)
        assert (len(heads.keys), len(heads.queries)) == (kv_heads, queries)
        assert len(even_share(config.experts.count, first)) == experts
    # Two ranks with copies of the last KV head share its query heads.
    last = [head_share(config.heads, config.kv_heads, AbsentRank(rank, 16)) for rank in (14, 15)]
    assert [share.keys for share in last] == [range(7, 8), range(7, 8)]
    assert [share.queries for share in last] == [range(84, 90), range(90, 96)]


@pytest.mark.parametrize(
    ("size", "ranks", "sizes"),
    [
        (4864, 3, [1664, 1600, 1600]),
        (1536, 4, [384] * 4),
        (200, 3, [67, 67, 66]),
        (800, 3, [320, 256, 224]),
        (2, 3, [1, 1, 0]),
    ],
)
def test_neurons_stay_together_in_blocks_where_there_are_enough(size, ranks, sizes):
    shares = [neuron_share(size, AbsentRank(rank, ranks)) for rank in range(ranks)]
    assert [len(share) for share in shares] == sizes
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]


def test_ranks_that_the_heads_do_not_allow(tmp_path):
    directory = SmallModel(heads=6, kv_heads=2).write_hugging_face(tmp_path / "a")
    with pytest.raises(ShardingImpossible, match="3 ranks can't hold 2 heads"):
        on_ranks(3, lambda group: load_model(directory, "float32", group=group))
    directory = SmallModel(heads=2, kv_heads=2).write_hugging_face(tmp_path / "b")
    with pytest.raises(InvalidConfig, match="4 ranks can't share 2 query heads"):
        on_ranks(4, lambda group: load_model(directory, "float32", group=group))
    with pytest.raises(InvalidConfig, match="4 ranks can't share a vocabulary of 3"):
        word_share(3, AbsentRank(0, 4))


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ranks_that_round_agree_and_err_no_more_than_one_alone(tmp_path, family, dtype, quantization):
    small = SmallModel(family=family, heads=6, kv_heads=3, vocabulary=67, inner=50, expert_inner=21)
    directory = small.write_hugging_face(tmp_path)

    def run(group: RankGroup) -> torch.Tensor:
        model = load_model(directory, dtype, group=group, quantization=quantization)
        return PagedRunner(model, 4, page_size=8).run("only", TOKENS, [7])

    right, alone = logits(directory), run(SOLO)
    found = on_ranks(3, run)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert 0 < (found[0] - right).abs().mean() < 1.5 * (alone - right).abs().mean()
