"""Where a model's tensors come from, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from .errors import WrongShape
from .layers.linear import Linear
from .layers.norm import RmsNorm


class WeightSource(ABC):
    """Tensors of one open checkpoint under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`).

    A source has the layout of Hugging Face checkpoints too: linears are `[out_features, in_features]`, and rotary
    dimensions come as two halves, not interleaved. Sources read a tensor only when it is asked for.
    """

    path: Path

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `MissingTensor`."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in whichever floating-point type is nearest to how it is stored.

        Raises `MissingTensor`, `UnsupportedTensorType`."""


class WeightReader:
    """Checked, typed reads: what a family's constructor draws its parameters from."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One parameter of exactly this shape, in the model's dtype and on its device."""
        return self.stacked([name], [shape[0]], *shape[1:])

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The RMS norm whose weight is `name.weight`."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """The linears `names`, whose weights are `[rows[i], columns]`, as one whose outputs are theirs side by side."""
        weight = self.stacked([f"{name}.weight" for name in names], rows, columns)
        return Linear(weight, self.stacked([f"{name}.bias" for name in names], rows) if bias else None)

    def stacked(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> torch.Tensor:
        """Several parameters `[rows[i], *rest]` one below the other, so that one product computes them all.

        Raises `MissingTensor`, `WrongShape`, `UnsupportedTensorType`."""
        result = torch.empty((sum(rows), *rest), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(result, list(rows)), strict=True):
            found = self.source.shape(name)
            if found != tuple(part.shape):
                raise WrongShape(name, part.shape, found, self.source.path)
            part.copy_(self.source.read(name))
        return result
