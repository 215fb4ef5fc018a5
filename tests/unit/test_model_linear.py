"""Linears with weights of eight bits against the same in floating point."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model import _kernels
from baton_model.layers.linear import FloatLinear, Int8Linear, PackedLinear, hadamard, make_linear, packs


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@given(st.integers(0, 8))
def test_hadamard_matrices_rotate(exponent):
    matrix = hadamard(2**exponent)
    assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5)
    assert torch.equal(matrix, matrix.T)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 200), st.booleans(), st.integers(0, 99))
def test_int8_of_any_shape(tokens, inputs, outputs, bias, seed):
    weight, x = random(outputs, inputs, seed=seed), random(tokens, inputs, seed=seed + 1)
    offsets = random(outputs, seed=seed + 2) if bias else None
    found = Int8Linear(weight, offsets)(x)
    # Each factor is off by half a step at most, a step being a 127th of the largest after rotation, which is no more
    # than the norm.
    norms = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert ((found - FloatLinear(weight, offsets)(x)).abs() <= norms * inputs**0.5 / 127 + 1e-5).all()


@settings(max_examples=60)
@given(
    st.integers(1, 20),
    st.integers(1, 600),
    st.integers(1, 200),
    st.booleans(),
    st.sampled_from([1, 3]),
    st.integers(0, 99),
)
def test_products_of_whole_numbers_are_exact(tokens, inputs, outputs, extreme, threads, seed):
    """Tokens whose largest value is 127 are not rounded, and no sum of bytes saturates."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randint(-127, 128, (n, inputs), generator=generator) for n in (tokens, outputs))
    if extreme:
        x, weight = x.sign() * 127, weight.sign() * 127
    x[:, seed % inputs] = 127
    bias = torch.randint(-9, 10, (outputs,), generator=generator)
    packed, floats, offsets = weight.to(torch.int8), x.float(), bias.float()
    scales = 2.0 ** torch.randint(-3, 4, (outputs,), generator=generator)
    matrix = _kernels.Int8Matrix(packed.data_ptr(), scales.data_ptr(), outputs, inputs, 1)
    found = torch.empty(tokens, outputs)
    matrix.multiply(floats.data_ptr(), offsets.data_ptr(), found.data_ptr(), tokens, False, threads)
    assert torch.equal(found, (x @ weight.T).float() * scales + offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 6, 7, 8, 13, 300])
def test_what_a_token_gives_does_not_depend_on_its_neighbours(dtype, tokens):
    x = random(tokens, 256, seed=1).to(dtype)
    linear = Int8Linear(random(150, 256, seed=2), random(150, seed=3).to(dtype))
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_outliers_cost_little():
    """Three inputs that are forty times the others, always the same: what the models' residual streams look like."""
    weight, x = random(256, 512, seed=1), random(50, 512, seed=2)
    x[:, [3, 77, 200]] *= 40
    weight[:, [3, 77, 200]] /= 40
    assert relative_error(Int8Linear(weight, None)(x), FloatLinear(weight)(x)) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_int8_is_within_a_percent_or_two_of_float(dtype, tokens):
    weight, x, bias = random(320, 256, seed=1), random(tokens, 256, seed=2), random(320, seed=3)
    found = Int8Linear(weight, bias.to(dtype))(x.to(dtype))
    assert found.dtype == dtype
    assert relative_error(found, FloatLinear(weight, bias)(x)) < 0.02


def test_a_token_is_scaled_by_itself():
    """One large token takes nothing of the precision of its neighbours."""
    weight, x = random(64, 64, seed=1), random(3, 64, seed=2)
    loud = torch.stack((x[0], x[1] * 1e4, x[2]))
    linear = Int8Linear(weight, None)
    assert torch.equal(linear(loud)[[0, 2]], linear(x)[[0, 2]])


def test_zeros_give_the_bias():
    bias = random(5, seed=1)
    assert torch.equal(Int8Linear(random(5, 9, seed=2), bias)(torch.zeros(2, 9)), bias.expand(2, 5))
    assert torch.equal(Int8Linear(torch.zeros(5, 9), bias)(random(2, 9, seed=3)), bias.expand(2, 5))


def test_leading_dimensions_are_kept():
    assert Int8Linear(random(5, 9, seed=1), None)(random(2, 3, 9, seed=2)).shape == (2, 3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (2, 3, 48), (0, 48)])
def test_a_packed_weight_multiplies_as_the_plain_one(dtype, shape):
    weight, bias, x = (random(*size, seed=seed).to(dtype) for seed, size in enumerate([(80, 48), (80,), shape]))
    if not packs(weight):
        pytest.skip(f"oneDNN does not multiply {dtype} on this processor")
    found, expected = PackedLinear(weight, bias)(x), FloatLinear(weight, bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 0.06, rtol=0.01)
    # Of some columns of a wider tensor.
    wide = torch.cat((x, x), dim=-1)
    torch.testing.assert_close(PackedLinear(weight, bias)(wide[..., :48]), found)


def test_an_empty_share_is_not_quantised():
    assert make_linear(torch.empty(4, 0), None, "int8")(torch.empty(2, 0)).shape == (2, 4)
