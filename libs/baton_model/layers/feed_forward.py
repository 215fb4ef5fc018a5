"""The feed-forward block (SwiGLU: Shazeer, 2020)."""

from __future__ import annotations

import torch

from ..shares import neuron_share
from ..weights import WeightReader


class GatedFeedForward:
    """`down(silu(gate) * up)`; gate and up are one matrix, so that they cost one product.

    A rank has a share of the inner neurons, an even one unless told otherwise: what it returns is its part of a sum
    over the ranks.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        inner: int,
        bias: bool,
        weights: WeightReader,
        share: range | None = None,
    ) -> None:
        share = neuron_share(inner, weights.group) if share is None else share
        self.gate_up = weights.column_parallel(
            [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], [share, share], hidden_size, bias
        )
        self.activate = weights.operators.silu_and_mul
        self.down = weights.row_parallel(f"{name}.down_proj", hidden_size, inner, share, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.gate_up(x)))
