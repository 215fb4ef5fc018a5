"""Drawing tokens: the right distribution, the right truncation, the same for a row alone and in a batch."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.errors import NonFiniteLogits
from baton_engine.messages import Sampling
from baton_engine.sampler import Draw, sample, uniform

VOCABULARY = 600  # more than two blocks of the inverse-CDF search, and not a whole number of them


def logits(rows: int, seed: int, vocabulary: int = VOCABULARY, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw_one(row: torch.Tensor, sampling: Sampling, position: int = 0) -> int:
    return sample(row.unsqueeze(0), [Draw(sampling, position)])[0][0]


def kept(row: torch.Tensor, sampling: Sampling) -> set[int]:
    """The tokens that sampling may answer, by sorting: the definition."""
    probabilities = (row.double() / sampling.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(float(probabilities[token]) for token in order)
    found: set[int] = set()
    mass = 0.0
    for token in order:
        if mass >= sampling.top_p * total:
            break
        found.add(token)
        mass += float(probabilities[token])
    return found


def test_greedy_takes_the_best_token() -> None:
    rows = logits(5, 0)
    tokens, logprobs = sample(rows, [Draw(Sampling(temperature=0), 0)] * 5)
    assert list(tokens) == rows.argmax(-1).tolist() and logprobs == ()


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 100_000), attempt=st.integers(0, 20))
def test_uniform_numbers_are_in_range(seed: int, position: int, attempt: int) -> None:
    assert 0 <= uniform(seed, position, attempt) < 1


@pytest.mark.parametrize("what", ["seed", "position", "attempt"])
def test_uniform_numbers_are_uniform_along_each_argument(what: str) -> None:
    numbers = [uniform(**{"seed": 3, "position": 5, "attempt": 0, what: index}) for index in range(20_000)]
    buckets = collections.Counter(int(number * 20) for number in numbers)
    # 20,000 draws over 20 buckets: standard deviation 31.
    assert all(abs(buckets[bucket] - 1000) < 160 for bucket in range(20))
    products = [(a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(numbers)]
    assert abs(math.fsum(products) / len(products)) < 0.004


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=5),
        Sampling(top_p=0.7),
        Sampling(temperature=1.5, top_k=20, top_p=0.6),
    ],
    ids=str,
)
def test_draws_follow_the_truncated_distribution(sampling: Sampling) -> None:
    row = logits(1, 4)[0]
    draws = 20_000
    tokens, _ = sample(row.expand(draws, -1), [Draw(sampling, position) for position in range(draws)])
    counts = collections.Counter(tokens)
    allowed = kept(row, sampling)
    assert set(counts) <= allowed
    probabilities = (row.double() / sampling.temperature).softmax(-1)
    mass = sum(float(probabilities[token]) for token in allowed)
    for token in allowed:
        expected = draws * float(probabilities[token]) / mass
        assert abs(counts[token] - expected) < 5 * math.sqrt(expected) + 5


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(1e-6, 10),
    top_k=st.integers(0, VOCABULARY + 1),
    top_p=st.floats(0.001, 1),
    draw_seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200)
def test_no_token_outside_the_truncation_is_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, draw_seed: int
) -> None:
    row = logits(1, seed)[0]
    token = draw_one(row, Sampling(temperature, top_p, top_k, draw_seed))
    # Float32 sums against float64: a token at the very edge may fall either way.
    assert token in kept(row, Sampling(temperature, min(top_p * 1.0001 + 1e-6, 1.0), top_k, draw_seed))


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rows = logits(12, 7)
    samplings = [
        Sampling([0.0, 0.5, 1.0, 2.0][row % 4], top_p=[1.0, 0.9, 0.5][row % 3], top_k=[0, 10][row % 2], seed=row)
        for row in range(12)
    ]
    for position in range(30):
        draws = [Draw(sampling, position) for sampling in samplings]
        together = sample(rows, draws)[0]
        alone = [draw_one(rows[row], samplings[row], position) for row in range(12)]
        backwards = sample(rows.flip(0), draws[::-1])[0][::-1]
        assert list(together) == alone == list(backwards)


def test_seed_and_position_both_matter() -> None:
    row = logits(1, 1, scale=0.1)[0]
    assert len({draw_one(row, Sampling(seed=seed)) for seed in range(50)}) > 30
    assert len({draw_one(row, Sampling(seed=1), position) for position in range(50)}) > 30


def test_the_ends_of_the_distribution_are_reached_and_never_passed() -> None:
    row = torch.full((VOCABULARY,), -math.inf)
    row[3], row[290] = 0.0, 0.0
    assert {draw_one(row, Sampling(seed=seed)) for seed in range(40)} == {3, 290}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    row = logits(1, 2)[0] * 100
    assert draw_one(row, Sampling(temperature=1e-30)) == int(row.argmax())


def test_top_k_one_is_greedy() -> None:
    row = logits(1, 2)[0]
    assert {draw_one(row, Sampling(top_k=1, seed=seed)) for seed in range(20)} == {int(row.argmax())}


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    rows = logits(3, 9)
    draws = [
        Draw(Sampling(temperature=0.3, top_k=4, logprobs=2), 1),
        Draw(Sampling(temperature=0), 1),
        Draw(Sampling(temperature=0, logprobs=0), 1),
    ]
    tokens, logprobs = sample(rows, draws)
    expected = rows.double().log_softmax(-1)
    first, second, third = logprobs
    assert first is not None and second is None and third is not None
    assert first.sampled.token_id == tokens[0]
    assert first.sampled.logprob == pytest.approx(float(expected[0, tokens[0]]), abs=1e-5)
    best = expected[0].topk(2)
    assert [top.token_id for top in first.top] == best.indices.tolist()
    assert [top.logprob for top in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert third.top == () and third.sampled.token_id == tokens[2]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(poison: float, temperature: float) -> None:
    rows = logits(2, 0)
    rows[1, 5] = poison
    with pytest.raises(NonFiniteLogits):
        sample(rows, [Draw(Sampling(temperature=temperature), 0)] * 2)


@pytest.mark.parametrize("sampling", [Sampling(top_k=40), Sampling(top_k=40, top_p=0.8), Sampling(top_p=0.3)], ids=str)
@pytest.mark.parametrize("scale", [0.3, 5.0])
def test_truncation_of_a_large_vocabulary(sampling: Sampling, scale: float) -> None:
    """Of a flat distribution most draws fall outside at first, and the kth largest of many is looked for among few."""
    row = logits(1, 3, vocabulary=20_000, scale=scale)[0]
    tokens, _ = sample(row.expand(300, -1), [Draw(sampling, position) for position in range(300)])
    allowed = kept(row, sampling)
    assert set(tokens) <= allowed
    if len(allowed) <= 40:
        assert len(set(tokens)) > len(allowed) / 3


def test_ties_for_the_last_place_of_top_k_share_it() -> None:
    row = torch.zeros(VOCABULARY)
    row[[5, 9]] = 3.0
    tokens = {draw_one(row, Sampling(top_k=3, seed=seed)) for seed in range(400)}
    assert {5, 9} < tokens
    assert len(tokens) > 3
