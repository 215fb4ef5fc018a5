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


class TorchOperators(Operators):
    """On any device."""

    captured = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
