"""Drawing tokens on a GPU, on a stand-in for FlashInfer: what a draw depends on, and how it compares with the CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fake_flashinfer
from baton_engine.errors import NonFiniteLogits
from baton_engine.gpu_sampler import GpuSampler, invert
from baton_engine.messages import Sampling
from baton_engine.sampler import Draw, sample

VOCABULARY = 600
SAMPLE = GpuSampler(fake_flashinfer)


def logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@given(st.integers(0, 99), st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.7]), min_size=1, max_size=6))
def test_without_truncation_it_draws_what_the_cpu_draws(seed, temperatures):
    rows = logits(len(temperatures), seed)
    draws = [Draw(Sampling(temperature, seed=seed, logprobs=2), row) for row, temperature in enumerate(temperatures)]
    assert SAMPLE(rows, draws) == sample(rows, draws)


def test_a_row_draws_the_same_alone_and_in_any_batch():
    rows = logits(12, 7)
    samplings = [
        Sampling([0.0, 0.5, 1.0, 2.0][row % 4], top_p=[1.0, 0.9, 0.5][row % 3], top_k=[0, 10][row % 2], seed=row)
        for row in range(12)
    ]
    for position in range(10):
        draws = [Draw(sampling, position) for sampling in samplings]
        together = SAMPLE(rows, draws)[0]
        assert list(together) == [SAMPLE(rows[row : row + 1], draws[row : row + 1])[0][0] for row in range(12)]
        assert together == SAMPLE(rows.flip(0), draws[::-1])[0][::-1]


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=5), Sampling(top_p=0.7), Sampling(1.5, top_k=20, top_p=0.6)], ids=str
)
def test_truncated_draws_are_of_the_cpus_distribution(sampling):
    """Both draw 10,000 times: no token is drawn by one and plainly not possible for the other."""
    row, count = logits(1, 4)[0], 10_000
    draws = [Draw(sampling, position) for position in range(count)]
    ours, theirs = (
        torch.bincount(torch.tensor(each(row.expand(count, -1), draws)[0]), minlength=VOCABULARY)
        for each in (SAMPLE, sample)
    )
    assert torch.equal(ours > 0, theirs > 0)
    assert ((ours - theirs).abs() < 6 * (ours + theirs).double().sqrt() + 6).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(poison, temperature):
    rows = logits(2, 0)
    rows[1, 5] = poison
    with pytest.raises(NonFiniteLogits):
        SAMPLE(rows, [Draw(Sampling(temperature=temperature, top_k=4), 0)] * 2)


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_a_token_without_weight_is_never_found(number):
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    assert invert(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [1 if number < 0.5 else 3]
