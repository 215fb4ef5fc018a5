"""What a rank reads of a checkpoint: its share, once, and in every format what a whole read would give there."""

from __future__ import annotations

from collections import defaultdict

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.families import registry
from baton_model.gguf_file import GgufFile, GgufWeights
from baton_model.hugging_face import SafetensorsWeights
from baton_model.parallel import RankGroup
from baton_model.platform import cpu_platform
from baton_model.settings import Settings
from baton_model.weights import WeightReader, WeightSource
from gguf_blocks import random_blocks, values
from memory_weights import AbsentRank, MemoryWeights
from small_models import SmallModel

Kind = gguf.GGMLQuantizationType


def load(small: SmallModel, group: RankGroup) -> tuple[MemoryWeights, list[float]]:
    source, progress = MemoryWeights(small.state), [0.0]
    config = small.config()
    family = registry.for_hugging_face(config["architectures"][0], source.path)
    platform = cpu_platform()
    reader = WeightReader(source, torch.float32, platform, progress.append, group)
    family.build(family.config_from_hugging_face(Settings(config, source.path)), reader, platform.attention)
    return source, progress


@st.composite
def sharded(draw) -> tuple[SmallModel, int]:
    kv_heads = draw(st.integers(1, 5))
    copies = draw(st.integers(1, 3))
    ranks = draw(st.integers(1, kv_heads)) if copies == 1 else kv_heads * copies
    # Each rank has a query head at least.
    group = draw(st.integers(copies, 4))
    small = SmallModel(
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2,
        hidden=4,
        # Each rank has a word at least.
        vocabulary=draw(st.integers(ranks, 40)),
        inner=draw(st.integers(1, 40)),
        experts=draw(st.integers(2, 9)),
        dense_layers=(1,),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    return small, ranks


@given(sharded())
@settings(max_examples=60)
def test_together_the_ranks_read_every_element_and_what_is_split_once(case):
    small, ranks = case
    sources, progress = zip(*(load(small, AbsentRank(rank, ranks)) for rank in range(ranks)), strict=True)
    copies = max(1, ranks // small.kv_heads)
    kinds = defaultdict(set)
    for name in small.state:
        counts = sum(source.counts[name] for source in sources)
        whole = "norm" in name or "mlp.gate." in name
        expected = ranks if whole else copies if "k_proj" in name or "v_proj" in name else 1
        assert (counts == expected).all(), name
        kinds[whole].add(name)
    assert all(kinds.values())
    for told in progress:
        assert told == sorted(told)
        assert told[-1] == 1.0


@given(sharded())
@settings(max_examples=40)
def test_no_rank_reads_more_than_its_share_rounded_up(case):
    small, ranks = case
    parts = min(ranks, small.kv_heads)
    group = small.heads // small.kv_heads

    def share(size: int) -> int:
        return -(-size // ranks)

    bound = 0
    for name, tensor in small.state.items():
        if "k_proj" in name or "v_proj" in name:
            heads = -(-small.kv_heads // parts)
            bound += tensor.size // small.kv_heads * heads
        elif "q_proj" in name or "o_proj.weight" in name:
            heads = group * -(-small.kv_heads // parts) if ranks <= small.kv_heads else share(small.heads)
            bound += tensor.size // small.heads * heads
        elif "embed" in name or "lm_head" in name or ("mlp.gate_proj" in name or "mlp.up_proj" in name):
            bound += tensor.size // len(tensor) * share(len(tensor))
        elif "mlp.down_proj.weight" in name:
            bound += tensor.size // tensor.shape[1] * share(tensor.shape[1])
        elif ".experts.0." in name:
            bound += tensor.size * share(small.experts)
        elif ".experts." not in name:
            bound += tensor.size
    for rank in range(ranks):
        assert load(small, AbsentRank(rank, ranks))[0].elements <= bound


def parts_of(draw, shape: tuple[int, ...]) -> list[range]:
    result = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        result.append(range(start, draw(st.integers(start + 1, size))))
    return result


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[tuple[WeightSource, SmallModel]]:
    """The same kinds of tensors in all formats: rotary and experts included."""
    directory, found = tmp_path_factory.mktemp("formats"), []
    for family, heads, kv_heads in (("llama", 4, 2), ("qwen3_moe", 2, 1)):
        small = SmallModel(family=family, hidden=64, inner=96, expert_inner=96, heads=heads, kv_heads=kv_heads)
        found.append((SafetensorsWeights(small.write_hugging_face(directory / family, shards=2)), small))
        for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1):
            path = small.write_gguf(directory / f"{family}-{kind.name}.gguf", kind)
            source = GgufWeights(
                GgufFile(path), layers=2, heads=heads, kv_heads=kv_heads, interleaved_rotary=family == "llama"
            )
            found.append((source, small))
    return found


@given(data=st.data())
@settings(max_examples=150)
def test_a_slice_is_that_part_of_the_whole(sources, data):
    source, small = data.draw(st.sampled_from(sources))
    name = data.draw(st.sampled_from(sorted(small.state)))
    whole = source.read(name)
    assert tuple(whole.shape) == source.shape(name) == small.state[name].shape
    slices = parts_of(data.draw, source.shape(name))
    expected = whole[tuple(slice(part.start, part.stop) for part in slices)]
    assert torch.equal(source.read(name, slices), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quantised_tensors(tmp_path, kind):
    """Against the formulas, whole and in columns that no block begins or ends at."""
    random = np.random.default_rng(5)
    blocks = random_blocks(kind, 3, 768, random)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "k.gguf")
    expected = values(kind, blocks)
    assert expected.std() > 0.01
    assert file.shape("blk.0.ffn_up.weight") == (3, 768)
    np.testing.assert_allclose(file.read("blk.0.ffn_up.weight"), expected, rtol=1e-5, atol=1e-6)
    for columns in (range(256, 512), range(100, 300), range(511, 513), range(700, 768)):
        part = file.read("blk.0.ffn_up.weight", [range(1, 3), columns])
        np.testing.assert_allclose(part, expected[1:3, columns.start : columns.stop], rtol=1e-5, atol=1e-6)
