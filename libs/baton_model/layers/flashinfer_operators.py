"""Operators through FlashInfer, for float16 and bfloat16 on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from .operators import Operators


class FlashInferOperators(Operators):
    """`kernels`: the module flashinfer. Both normalise and multiply in float32 and round once, as torch does."""

    captured = True

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # It takes two dimensions, or three with rows of heads.
        normalised: torch.Tensor = self._kernels.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps=eps)
        return normalised.view(x.shape)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._kernels.silu_and_mul(gate_up)
        return result
