"""Linear maps, in floating point or with weights of eight bits."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from .. import _kernels

Quantization = Literal["none", "int8"]

# Inputs that a rotation mixes at most. The more, the flatter a token becomes: the perplexity of SmolLM2-135M rises by
# 4.7 % without a rotation, by 1.0 with 64 and by 0.6 with 512 inputs of the 1,536 of its down projections.
_ROTATED = 512


class Linear(ABC):
    """`x @ weight.T + bias`: `[..., in_features]` to `[..., out_features]` in x's dtype."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class FloatLinear(Linear):
    """weight `[out_features, in_features]`, bias `[out_features]` or None, both in x's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """As `FloatLinear`, the weight in the order in which oneDNN multiplies; the original is not kept.

    Beside torch's own product, which packs anew at every call in bfloat16 and goes through MKL in float32: in bfloat16
    half the time up to 8 tokens and 0.95 of it with 512, in float32 the same with one token and 0.45 with 2 and with
    512 (one core of an EPYC with AVX-512; torch 2.13).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """As those of `FloatLinear`, on the CPU."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether `PackedLinear` can be made of a weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Int8Linear(Linear):
    """Weights and activations in eight bits, sums in 32 (LLM.int8(), Dettmers et al., 2022, without its outliers).

    A weight row is `scale * q` with q in [-127, 127], symmetric, the scale chosen so that the row's largest weight is
    127. Each token is quantised likewise when it comes: its largest activation is 127. A few of a token's activations
    are often twenty times the others, which would be left with three or four bits; so both factors are rotated first by
    the same Hadamard matrix, block by block, which changes no product and spreads what is large (QuaRot, Ashkboos et
    al., 2024). The float weight is not kept.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` `[out_features, in_features]` of any float; bias `[out_features]` in the activations' dtype, or
        None."""
        block = math.gcd(weight.shape[1], _ROTATED)
        weight = (weight.to(torch.float32).reshape(-1, block) @ hadamard(block)).view(weight.shape)
        largest = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny)
        quantized = (weight * (127 / largest)[:, None]).round_().to(torch.int8)
        scales = largest / 127
        self._outputs, inputs = weight.shape
        self._matrix = _kernels.Int8Matrix(quantized.data_ptr(), scales.data_ptr(), self._outputs, inputs, block)
        self._bias = bias
        self._bias_address = 0 if bias is None else bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        product = x.new_empty((*x.shape[:-1], self._outputs))
        self._matrix.multiply(
            x.data_ptr(),
            self._bias_address,
            product.data_ptr(),
            x.numel() // x.shape[-1],
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return product


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, orthonormal and symmetric: float32 `[size, size]`, size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) * 0.5**0.5
    return matrix


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization) -> Linear:
    """A linear of these parameters, `[out_features, in_features]` and `[out_features]` or None."""
    # A rank may have no share of a small linear; there is nothing to quantise or pack then.
    if not weight.numel():
        return FloatLinear(weight, bias)
    if quantization == "int8":
        return Int8Linear(weight, bias)
    return PackedLinear(weight, bias) if packs(weight) else FloatLinear(weight, bias)
