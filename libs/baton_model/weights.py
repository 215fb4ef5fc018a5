"""Where a model's tensors come from, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from .errors import UnknownTensor, WrongShape
from .layers.linear import Linear, Quantization, make_linear
from .layers.norm import RmsNorm
from .layers.vocabulary import Embedding, Head
from .parallel import SOLO, RankGroup
from .platform import Platform
from .shares import word_share


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
        """Of the whole tensor. Raises `MissingTensor`."""

    @abstractmethod
    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """The tensor on the CPU, in whichever floating-point type is nearest to how it is stored; with `slices`, these
        indices of its first dimensions (none empty, steps of 1), and no more of the file than they need.

        Raises `MissingTensor`, `UnsupportedTensorType`."""

    def untouched(self) -> Collection[str]:
        """Tensors that nobody has asked for and that would matter, by their names in the file. Hugging Face directories
        may hold any others, which transformers passes over too."""
        return ()


class WeightReader:
    """Checked, typed reads: what a family's constructor draws its parameters from.

    Sizes are always those of the whole model; shares say which part of them this rank of `group` takes. A
    column-parallel linear has some of the outputs; a row-parallel one takes some of the inputs and returns one part of
    a sum, which the caller takes with `group.all_reduce`.

    With `quantization` the weights of linears are quantised as they are read; all other parameters, and what goes in
    and out of a linear, are of `dtype`.

    `progress` is told the share of the checkpoint's tensors that have been read, in (0, 1], after each.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        platform: Platform,
        progress: Callable[[float], None] | None = None,
        group: RankGroup = SOLO,
        quantization: Quantization = "none",
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = platform.device
        self.operators = platform.operators
        self.group = group
        self.quantization = quantization
        self._progress = progress
        self._done = 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One parameter of exactly this shape, in the model's dtype unless another is given, and on its device.

        Raises `MissingTensor`, `WrongShape`, `UnsupportedTensorType`."""
        return self.part(name, shape, [range(size) for size in shape], dtype)

    def part(
        self, name: str, shape: tuple[int, ...], slices: Sequence[range], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """These slices, one a dimension, of a parameter of exactly this shape. Raises as `tensor` does."""
        self.check(name, shape)
        sizes = [len(taken) for taken in slices]
        result = torch.empty(sizes, dtype=dtype or self.dtype, device=self.device)
        self.fill(result, name, shape, slices)
        return result

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for a parameter, in the model's dtype and on its device; for `fill`."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The RMS norm whose weight is `name.weight`. Raises as `tensor` does."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps, self.operators)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """The linears `names`, whose weights are `[rows[i], columns]`, as one whose outputs are theirs side by side:
        one product instead of several. Whole on every rank. Raises as `tensor` does."""
        return self.column_parallel(names, rows, [range(size) for size in rows], columns, bias)

    def column_parallel(
        self, names: Sequence[str], rows: Sequence[int], shares: Sequence[range], columns: int, bias: bool
    ) -> Linear:
        """As `linear`, but of the outputs of `names[i]` only `shares[i]`."""
        return self._linear(names, rows, shares, columns, range(columns), bias)

    def row_parallel(self, name: str, rows: int, columns: int, share: range, bias: bool) -> Linear:
        """The linear `name` for the inputs `share` only: `[..., len(share)]` to this rank's part of `[..., rows]`. The
        bias is in rank 0's part, so that the sum has it once. Raises as `tensor` does."""
        if bias and self.group.rank != 0:
            self.leave_out(1)
            bias = False
        return self._linear([name], [rows], [range(rows)], columns, share, bias)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """This rank's words of the table `name.weight`, `[vocab_size, hidden_size]`. Raises as `tensor` and
        `word_share` do."""
        words = word_share(vocab_size, self.group)
        self.check(f"{name}.weight", (vocab_size, hidden_size))
        weight = self.empty(len(words), hidden_size)
        self.fill(weight, f"{name}.weight", (vocab_size, hidden_size), [words, range(hidden_size)])
        return Embedding(weight, words, self.group)

    def head(self, name: str, vocab_size: int, hidden_size: int) -> Head:
        """The linear `name` that makes logits, each rank those of its words. Raises as `tensor` does."""
        words = word_share(vocab_size, self.group)
        return Head(self.column_parallel([name], [vocab_size], [words], hidden_size, bias=False), self.group)

    def tied_head(self, name: str, embedding: Embedding, vocab_size: int, hidden_size: int) -> Head:
        """The head of a model whose embedding is its head too. The checkpoint may have a copy of it as the linear
        `name`; one that differs is a head of its own, as in transformers. Raises as `tensor` does."""
        copy = f"{name}.weight"
        if copy in self.source:
            own = self.part(copy, (vocab_size, hidden_size), [embedding.words, range(hidden_size)])
            if not torch.equal(own, embedding.weight):
                return Head(self.make_linear(own, None), self.group)
        return Head(self.make_linear(embedding.weight, None), self.group)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """The one place where a linear is made of its parameters."""
        return make_linear(weight, bias, self.quantization)

    def _linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        shares: Sequence[range],
        columns: int,
        taken: range,
        bias: bool,
    ) -> Linear:
        for name, size in zip(names, rows, strict=True):
            self.check(f"{name}.weight", (size, columns))
        sizes = [len(share) for share in shares]
        # What is quantised is rounded once, from what the checkpoint says.
        dtype = self.dtype if self.quantization == "none" else torch.float32
        weight = torch.empty((sum(sizes), len(taken)), dtype=dtype, device=self.device)
        for name, size, share, part in zip(names, rows, shares, torch.split(weight, sizes), strict=True):
            self.fill(part, f"{name}.weight", (size, columns), [share, taken])
        if not bias:
            return self.make_linear(weight, None)
        biases = self.empty(sum(sizes))
        for name, size, share, part in zip(names, rows, shares, torch.split(biases, sizes), strict=True):
            self.fill(part, f"{name}.bias", (size,), [share])
        return self.make_linear(weight, biases)

    def fill(self, target: torch.Tensor, name: str, shape: tuple[int, ...], slices: Sequence[range]) -> None:
        """Reads these slices, one a dimension, of a parameter of exactly this shape. Raises as `tensor` does."""
        self.check(name, shape)
        if target.numel():
            target.copy_(self.source.read(name, slices))
        self.leave_out(1)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """That the parameter is there and has this shape; before room is made for it, which may be any amount.

        Raises `MissingTensor`, `WrongShape`."""
        found = self.source.shape(name)
        if found != shape:
            raise WrongShape(name, shape, found, self.source.path)

    def finish(self) -> None:
        """Nothing more will be read. Raises `UnknownTensor` where the checkpoint has more that would matter."""
        # Only the first rank has a part of everything.
        if self.group.rank == 0:
            for name in self.source.untouched():
                raise UnknownTensor(name, self.source.path)
        if self._progress is not None and self._done < len(self.source):
            self._progress(1.0)

    def leave_out(self, tensors: int) -> None:
        """Counts tensors as read that this rank has no use for."""
        self._done += tensors
        if self._progress is not None:
            self._progress(self._done / max(self._done, len(self.source)))
