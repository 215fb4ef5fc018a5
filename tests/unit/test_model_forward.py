"""The forward pass as its callers see it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_model.batch import ForwardBatch
from baton_model.config import RopeConfig
from baton_model.errors import InvalidBatch
from baton_model.layers.operators import TorchOperators
from baton_model.layers.rotary import Rotary, attention_factor, frequencies
from baton_model.loaders import load_model
from baton_model.model import Model
from paged_runner import PagedRunner
from small_models import SmallModel


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load_model(SmallModel(layers=3).write_hugging_face(tmp_path_factory.mktemp("model")), "float32")


def test_layers_are_reported_once_their_entries_are_in_the_pages(model):
    runner = PagedRunner(model, pages=2)
    filled: list[list[int]] = []

    def on_layer(layer: int) -> None:
        assert layer == len(filled)
        filled.append(runner.cache.tensor.flatten(1).count_nonzero(1).tolist())

    runner.step({"only": [1, 2, 3]}, on_layer)
    entries = 3 * 2 * 2 * 16
    assert filled == [[entries, 0, 0], [entries, entries, 0], [entries, entries, entries]]


def test_logits_are_computed_for_the_rows_given(model):
    runner = PagedRunner(model, pages=2)
    hidden = model.forward(ForwardBatch.build([([1, 2, 3, 4], 0)], [[0]]), runner.cache)
    assert hidden.shape == (4, 32)
    logits = model.logits(hidden[[3, 1]])
    assert logits.shape == (2, 64)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, model.logits(hidden)[[3, 1]])


def test_the_order_of_sequences_in_a_batch_does_not_matter(model):
    one = PagedRunner(model, pages=8).step({"a": [1, 2, 3], "b": [4], "c": [5] * 20})
    other = PagedRunner(model, pages=8).step({"c": [5] * 20, "b": [4], "a": [1, 2, 3]})
    for name, rows in one.items():
        torch.testing.assert_close(rows, other[name])


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (ForwardBatch.build([([1], 128)], [list(range(9))]), "129 tokens; the model's context is 128"),
        (ForwardBatch.build([([64], 0)], [[0]]), r"\[0, 64\)"),
        (ForwardBatch.build([([-1], 0)], [[0]]), r"\[0, 64\)"),
        (ForwardBatch.build([], []), "at least one"),
        (ForwardBatch(torch.tensor([1, 2]), torch.tensor([0, 1]), [1], [1], [[0]]), "sum to 1; the batch has 2"),
        (ForwardBatch(torch.tensor([1, 2]), torch.tensor([0]), [2], [2], [[0]]), "equally long"),
        (ForwardBatch(torch.tensor([1]), torch.tensor([0]), [1], [1], [[0], [1]]), "2 page_tables"),
        (ForwardBatch(torch.tensor([1, 2]), torch.tensor([0, 1]), [2], [1], [[0]]), "2 new tokens in a context of 1"),
        (ForwardBatch(torch.tensor([1]), torch.tensor([0]), [1, 0], [1, 1], [[0], [1]]), "0 new tokens"),
    ],
)
def test_a_bad_batch_is_refused_before_anything_is_written(model, batch, complaint):
    runner = PagedRunner(model, pages=9)
    with pytest.raises(InvalidBatch, match=complaint):
        model.forward(batch, runner.cache)
    assert runner.cache.tensor.count_nonzero() == 0


def test_a_cache_of_another_model_is_refused(model, tmp_path):
    other = load_model(SmallModel(layers=2).write_hugging_face(tmp_path), "float32")
    with pytest.raises(InvalidBatch, match="2 layers"):
        model.forward(ForwardBatch.build([([1], 0)], [[0]]), PagedRunner(other, pages=1).cache)


KINDS = st.builds(
    RopeConfig,
    theta=st.floats(100, 1e6),
    kind=st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    factor=st.floats(1, 64),
    original_context_length=st.integers(32, 8192),
)


@given(KINDS, st.sampled_from([8, 64, 128]))
def test_stretched_frequencies_lie_between_the_plain_and_the_divided_ones(config, head_dim):
    plain = frequencies(RopeConfig(theta=config.theta), head_dim)
    found = frequencies(config, head_dim)
    assert found.shape == (head_dim // 2,)
    assert (found <= plain * (1 + 1e-6)).all()
    assert (found >= plain / config.factor * (1 - 1e-6)).all()
    assert attention_factor(config) >= 1.0


@given(st.integers(0, 100_000), st.integers(0, 1000))
def test_scores_depend_on_the_distance_only(position, distance):
    rotary = Rotary(RopeConfig(theta=10_000.0), 16, torch.float64, torch.device("cpu"), TorchOperators())
    rotary._frequencies = rotary._frequencies.to(torch.float64)
    torch.manual_seed(distance)
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64)

    def score(at: int) -> torch.Tensor:
        turned_query, turned_key = query.clone(), key.clone()
        rotary(torch.tensor([at + distance]))(turned_query)
        rotary(torch.tensor([at]))(turned_key)
        return (turned_query * turned_key).sum()

    torch.testing.assert_close(score(position), score(0), atol=0.05, rtol=0)
