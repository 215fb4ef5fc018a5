"""A model on FlashInfer's operators and attention, and its decodes in graphs: on stand-ins of both, against the CPU."""

from __future__ import annotations

import random

import pytest
import torch

import fake_flashinfer
from baton_model.attention.flashinfer import FlashInferAttention
from baton_model.batch import ForwardBatch
from baton_model.cache import open_cache
from baton_model.decode_graphs import DecodeGraphs, graph_sizes
from baton_model.errors import DeviceUnavailable, InvalidBatch, InvalidConfig
from baton_model.loaders import load_model
from baton_model.model import Model
from baton_model.platform import Platform, cpu_platform, cuda_platform, flashinfer_platform
from recorded_graph import RecordedGraph
from small_deepseek import SmallDeepseek
from small_models import SmallModel

PAGES, PAGE_SIZE = 40, 4


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    small = SmallModel(family=request.param, layers=3, heads=6, kv_heads=2)
    return small.write_hugging_face(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(checkpoint) -> Model:
    return load_model(checkpoint, "float32")


def stand_in() -> Platform:
    return flashinfer_platform(fake_flashinfer, torch.device("cpu"), (torch.float32,))


@pytest.fixture
def model(checkpoint) -> Model:
    return load_model(checkpoint, "float32", stand_in())


def cache_of(model: Model, order="HND"):
    shape = model.cache_shape
    planes = 1 if shape.latent else 2
    size = shape.layers * PAGES * planes * shape.kv_heads * PAGE_SIZE * shape.head_dim * 4
    buffer = torch.zeros(size, dtype=torch.uint8)
    return open_cache(buffer, shape, order=order, pages=PAGES, page_size=PAGE_SIZE, dtype=model.dtype)


def graphs_of(model: Model, cache, sizes, on_layer) -> DecodeGraphs:
    assert isinstance(model.backend, FlashInferAttention)
    return DecodeGraphs(model, model.backend, cache, sizes, RecordedGraph, on_layer)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_chunks_and_decodes_together(reference, model, order):
    batches = [
        ForwardBatch.build([(range(1, 8), 0), (range(20, 23), 0)], [[5, 1], [7]]),
        ForwardBatch.build([([8], 7), (range(30, 36), 3), ([9], 0)], [[5, 1], [7, 0, 2], [4]]),
    ]
    results = []
    for each in (reference, model):
        cache = cache_of(each, order)
        results.append([each.logits(each.forward(batch, cache)) for batch in batches] + [cache.tensor])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_a_replayed_graph_computes_what_a_pass_does_whatever_it_was_captured_with(reference, model):
    """Sequences of all lengths come and go; each step some of them, more or fewer than a graph holds."""
    ours, theirs = cache_of(model), cache_of(reference)
    graphs = graphs_of(model, ours, graph_sizes(3), lambda layer: None)
    for cache in (ours, theirs):
        cache.tensor.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    chance = random.Random(0)
    pages = list(range(PAGES))
    chance.shuffle(pages)
    tables = [[pages.pop() for _ in range(6)] for _ in range(4)]
    lengths = [0] * 4
    for _ in range(25):
        chosen = chance.sample(range(4), chance.choice([1, 2, 3, 4]))
        chosen = [i for i in chosen if lengths[i] < 6 * PAGE_SIZE] or [min(range(4), key=lambda i: lengths[i])]
        batch = ForwardBatch.build([([chance.randrange(64)], lengths[i]) for i in chosen], [tables[i] for i in chosen])
        expected = reference.forward(batch, theirs)
        assert graphs.holds(batch) == (len(chosen) < 4)
        found = graphs.run(batch) if graphs.holds(batch) else model.forward(batch, ours)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for i in chosen:
            lengths[i] += 1
    torch.testing.assert_close(ours.tensor, theirs.tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("small", [SmallModel(family="qwen3_moe"), SmallDeepseek()], ids=["qwen3_moe", "deepseek"])
def test_experts_and_latent_caches_are_captured_too(tmp_path, small):
    """One graph, replayed for tokens that choose other experts."""
    path = small.write_hugging_face(tmp_path)
    reference, model = load_model(path, "float32"), load_model(path, "float32", stand_in())
    ours, theirs = cache_of(model), cache_of(reference)
    graphs = graphs_of(model, ours, [2], lambda layer: None)
    for each in (ours, theirs):
        each.tensor.zero_()
    for past in range(6):
        batch = ForwardBatch.build([([5 + 7 * past], past), ([60 - 5 * past], past)], [[3, 9], [6, 1]])
        torch.testing.assert_close(graphs.run(batch), reference.forward(batch, theirs), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.tensor, theirs.tensor, atol=1e-4, rtol=1e-4)


def test_chunks_are_not_for_graphs(model):
    graphs = graphs_of(model, cache_of(model), [2], lambda layer: None)
    assert not graphs.holds(ForwardBatch.build([([1, 2], 0)], [[0]]))
    assert not graphs.holds(ForwardBatch.build([([1], 0)] * 3, [[0]] * 3))
    assert graphs.largest == 2


def test_what_is_queued_after_a_layer_is_replayed_with_it(model):
    done = torch.zeros(3, dtype=torch.int64)
    graphs = graphs_of(model, cache_of(model), [1], lambda layer: done[layer].add_(1))
    captured = done.clone()
    for _ in range(2):
        graphs.run(ForwardBatch.build([([1], 0)], [[3]]))
    assert (done - captured).tolist() == [2, 2, 2]


def test_a_page_outside_the_cache_is_refused_before_the_graph_runs(model):
    graphs = graphs_of(model, cache_of(model), [1], lambda layer: None)
    with pytest.raises(InvalidBatch, match="names page 40"):
        graphs.run(ForwardBatch.build([([1], 0)], [[40]]))


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_graph_sizes(max_batch, sizes):
    assert graph_sizes(max_batch) == sizes


def test_a_dtype_that_the_device_does_not_compute_in(checkpoint):
    with pytest.raises(InvalidConfig, match="dtype is 'bfloat16'; on 'cpu' models compute in float32"):
        load_model(checkpoint, "bfloat16", stand_in())


def test_without_a_gpu_the_error_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(
        DeviceUnavailable, match=r"FlashInfer can't be imported|there is no GPU to compute on"
    ) as caught:
        cuda_platform()
    assert caught.value.reason == "MODEL_DEVICE_UNAVAILABLE"


def test_operators_agree_with_torch():
    ours, theirs = stand_in().operators, cpu_platform().operators
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ours.silu_and_mul(x), theirs.silu_and_mul(x))
