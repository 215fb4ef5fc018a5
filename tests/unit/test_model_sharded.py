"""A model over several ranks is the model on one, and every rank reads its share and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton_kv.shards import ShardingImpossible
from baton_model.errors import InvalidConfig
from baton_model.loaders import load_model
from baton_model.parallel import SOLO, RankGroup
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


def test_ranks_that_the_heads_do_not_allow(tmp_path):
    directory = SmallModel(heads=6, kv_heads=2).write_hugging_face(tmp_path / "a")
    with pytest.raises(ShardingImpossible, match="3 ranks can't hold 2 heads"):
        on_ranks(3, lambda group: load_model(directory, "float32", group=group))
    directory = SmallModel(heads=2, kv_heads=2).write_hugging_face(tmp_path / "b")
    with pytest.raises(InvalidConfig, match="4 ranks can't share 2 query heads"):
        on_ranks(4, lambda group: load_model(directory, "float32", group=group))


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
