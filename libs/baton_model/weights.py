"""Where a model's tensors come from, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    def __len__(self) -> int:
        """How many tensors the checkpoint has."""

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
    """Checked, typed reads: what a family's constructor draws its parameters from.

    `progress` is told the share of the checkpoint's tensors that have been read, in (0, 1], after each.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._done = 0

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One parameter of exactly this shape, in the model's dtype and on its device.

        Raises `MissingTensor`, `WrongShape`, `UnsupportedTensorType`."""
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._fill(result, name)
        return result

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The RMS norm whose weight is `name.weight`. Raises as `tensor` does."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """The linears `names`, whose weights are `[rows[i], columns]`, as one whose outputs are theirs side by side:
        one product instead of several. Raises as `tensor` does."""
        weight = self._matrix(sum(rows), columns)
        for name, part in zip(names, torch.split(weight, list(rows)), strict=True):
            self._fill(part, f"{name}.weight")
        if not bias:
            return Linear(weight)
        biases = torch.empty(sum(rows), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(biases, list(rows)), strict=True):
            self._fill(part, f"{name}.bias")
        return Linear(weight, biases)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        if self.dtype == torch.float32 and self.device.type == "cpu":
            # Column by column: a product with one row then takes 17 instead of 25 ms for all linears of SmolLM2-135M,
            # with two rows 28 instead of 38, with more the same (one core of an EPYC with AVX-512, MKL). In bfloat16,
            # which goes through oneDNN, it is the other way round: 19 and 13.
            return torch.empty((columns, rows), dtype=self.dtype).t()
        return torch.empty((rows, columns), dtype=self.dtype, device=self.device)

    def _fill(self, target: torch.Tensor, name: str) -> None:
        found = self.source.shape(name)
        if found != tuple(target.shape):
            raise WrongShape(name, target.shape, found, self.source.path)
        target.copy_(self.source.read(name))
        self._done += 1
        if self._progress is not None:
            self._progress(self._done / max(self._done, len(self.source)))
