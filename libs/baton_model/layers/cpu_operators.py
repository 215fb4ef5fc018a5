"""Operators through the native kernels: each reads its operands once, where torch makes several passes."""

from __future__ import annotations

import torch

from .. import _kernels
from .operators import Operators


class CpuOperators(Operators):
    """For float32 and bfloat16. All compute in float32 and round once."""

    captured = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        _kernels.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, *_kind_and_threads(x)
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], inner))
        _kernels.silu_and_mul(
            gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // max(2 * inner, 1), inner, *_kind_and_threads(out)
        )
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rows, heads, size = x.shape
        if x.stride()[1:] != (size, 1):
            super().rotate(x, cos, sin)
            return
        bfloat16, threads = _kind_and_threads(x)
        _kernels.rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows, heads, size, bfloat16, threads)


def _kind_and_threads(x: torch.Tensor) -> tuple[bool, int]:
    return x.dtype == torch.bfloat16, torch.get_num_threads()
