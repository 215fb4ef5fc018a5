"""DeepSeek's models from GGUF, as they are from Hugging Face directories."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.errors import InvalidConfig
from baton_model.gguf_file import GgufFile
from baton_model.gguf_latent import LatentGgufWeights
from baton_model.loaders import load_config, load_model
from baton_model.parallel import SOLO, RankGroup
from paged_runner import PagedRunner
from rank_threads import on_ranks
from small_deepseek import SmallDeepseek

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
FUSED = "model.layers.0.self_attn.kv_b_proj.weight"


def logits(path, group: RankGroup = SOLO) -> torch.Tensor:
    return PagedRunner(load_model(path, "float32", group=group), 4, page_size=8).run("only", TOKENS, [7])


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("query_rank", [12, None])
def test_the_same_model_in_both_formats(tmp_path, generation, split, query_rank):
    small = SmallDeepseek(generation=generation, query_rank=query_rank)
    file = small.write_gguf(tmp_path / "small.gguf", split=split)
    expected = logits(small.write_hugging_face(tmp_path / "hf"))
    torch.testing.assert_close(logits(file), expected, atol=1e-5, rtol=1e-4)
    for found in on_ranks(3, lambda group: logits(file, group)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_yarn_has_the_temperature_of_the_scores(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7}
    small = SmallDeepseek()
    file = small.write_gguf(
        tmp_path / "small.gguf",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
        rope__scaling__yarn_log_multiplier=0.07,
    )
    expected = logits(small.write_hugging_face(tmp_path / "hf", rope_scaling=yarn))
    assert not torch.allclose(expected, logits(small.write_hugging_face(tmp_path / "plain")), atol=1e-2)
    torch.testing.assert_close(logits(file), expected, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[LatentGgufWeights, torch.Tensor]:
    small = SmallDeepseek()
    file = small.write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")
    source = LatentGgufWeights(GgufFile(file), layers=3, heads=4, kv_heads=1, interleaved_rotary=False)
    return source, torch.from_numpy(small.state[FUSED])


def ranges(size: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda x: x[0] < x[1]).map(lambda x: range(*x))


@settings(max_examples=60)
@given(ranges(64), ranges(16))
def test_slices_of_the_matrix_that_the_file_has_in_two(weights, rows, columns):
    source, expected = weights
    assert FUSED in source and source.shape(FUSED) == (64, 16)
    wanted = expected[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(source.read(FUSED, [rows, columns]), wanted)


def test_loading_reports_its_progress_up_to_the_end(tmp_path):
    progress: list[float] = []
    load_model(SmallDeepseek().write_gguf(tmp_path / "small.gguf"), "float32", progress=progress.append)
    assert progress == sorted(progress) and progress[-1] == 1.0


def test_quantised_matrices(tmp_path):
    small = SmallDeepseek(hidden=64, inner=64, rank=32, query_rank=32, nope=32, value=32, expert_inner=32)
    exact = logits(small.write_gguf(tmp_path / "exact.gguf"))
    rounded = logits(small.write_gguf(tmp_path / "rounded.gguf", gguf.GGMLQuantizationType.Q8_0))
    assert 0 < (rounded - exact).abs().mean() < 0.15 * exact.std()


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"attention__key_length_mla": 4}, "key_length_mla"),
        ({"expert_group_count": 3}, "expert_group_count"),
        ({"rope__scaling__attn_factor": 1.5}, "attn_factor"),
    ],
)
def test_settings_that_make_no_sense_are_named(tmp_path, metadata, complaint):
    with pytest.raises(InvalidConfig, match=complaint):
        load_config(SmallDeepseek().write_gguf(tmp_path / "small.gguf", **metadata))
