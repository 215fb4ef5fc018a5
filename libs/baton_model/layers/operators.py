"""Operators that a device may have one kernel for, where torch takes several."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F


class Operators(ABC):
    """What layers are built with. Results are the caller's own.

    `captured`: whether steps may be captured in a graph; a layer must not read a value of a tensor then.
    """

    captured: bool

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019): weight `[size]`."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `[..., 2 n]`, in which gate comes first: `[..., n]`."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turns `x [N, heads, head_dim]` in place: with `x = (a, b)` in halves, to `x * cos + (b, a) * sin`. `cos` and
        `sin`, signed, `[N, 1, head_dim]`, in x's dtype."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        x.mul_(cos).addcmul_(swapped, sin)


class TorchOperators(Operators):
    """On any device."""

    captured = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
