"""Normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .operators import Operators


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019): weight `[size]`."""

    weight: torch.Tensor
    eps: float
    operators: Operators

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The same over each head by itself, every head with a weight of its own: weight `[heads, head_dim]`."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> None:
        """Normalises `x [N, heads, head_dim]` in place."""
        torch.mul(F.rms_norm(x, x.shape[-1:], None, self.eps), self.weight, out=x)
