"""Mixtures of experts (Shazeer et al., 2017): each token goes through the few feed-forward blocks that a router chose.

Experts are split over the ranks, whole: a rank computes those that it has, for whichever tokens chose them, and
returns its part of a sum over the ranks. Routing is done by every rank, alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ..shares import even_share
from ..weights import WeightReader
from .feed_forward import GatedFeedForward


class Router(Protocol):
    """Which experts each token goes to, and how much each of them counts."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, hidden_size]` to factors `[N, k]`, of any floating-point type, and experts, int64 `[N, k]`, all
        different within a row. The same bits on every rank, for the same x."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The k most likely of a softmax over all experts: weight `[experts, hidden_size]`. `normalised`: the k factors are
    scaled so that they sum to 1."""

    weight: torch.Tensor
    k: int
    normalised: bool

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors, experts = F.linear(x, self.weight).softmax(-1, dtype=torch.float32).topk(self.k, -1)
        if self.normalised:
            factors /= factors.sum(-1, keepdim=True)
        return factors.to(x.dtype), experts


class Experts(Protocol):
    """The routed experts that a rank holds."""

    def __call__(self, x: torch.Tensor, factors: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`x [N, hidden_size]`, and what a router says of it (see `Router`), to this rank's part of as much."""


def routed_experts(name: str, count: int, hidden_size: int, inner: int, weights: WeightReader) -> Experts:
    """`count` experts `{name}.{number}`, each a feed-forward block of `inner` neurons, as the device runs them best.
    Raises as `WeightReader.tensor` does."""
    kind = StackedExperts if weights.operators.captured else SeparateExperts
    return kind(name, count, hidden_size, inner, weights)


class SeparateExperts:
    """Each expert a block of its own, of whatever kind of linear. The host asks how many tokens each expert has."""

    def __init__(self, name: str, count: int, hidden_size: int, inner: int, weights: WeightReader) -> None:
        self.count = count
        self.held = even_share(count, weights.group)
        self.experts = [
            GatedFeedForward(f"{name}.{number}", hidden_size, inner, False, weights, range(inner))
            for number in self.held
        ]
        weights.leave_out(3 * (count - len(self.held)))

    def __call__(self, x: torch.Tensor, factors: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        result = torch.zeros_like(x)
        flat = chosen.reshape(-1)
        # Tokens of one expert side by side, so that each expert is one product over all of its tokens.
        order = flat.argsort(stable=True)
        tokens, factors = order // chosen.shape[1], factors.reshape(-1, 1)[order]
        counts = flat.bincount(minlength=self.count).tolist()
        start = sum(counts[: self.held.start])
        for expert, count in zip(self.experts, counts[self.held.start : self.held.stop], strict=True):
            if count:
                rows = tokens[start : start + count]
                result.index_add_(0, rows, expert(x.index_select(0, rows)).mul_(factors[start : start + count]))
                start += count
        return result


class StackedExperts:
    """All experts in two matrices, and one grouped product with each: how many tokens an expert has stays on the
    device, so that a step can be captured in a graph. Sizes must be such that rows are multiples of 16 bytes."""

    def __init__(self, name: str, count: int, hidden_size: int, inner: int, weights: WeightReader) -> None:
        self.held = even_share(count, weights.group)
        if self.held:
            weights.check(f"{name}.{self.held.start}.gate_proj.weight", (inner, hidden_size))
        self.gate_up = weights.empty(len(self.held), 2 * inner, hidden_size)
        self.down = weights.empty(len(self.held), hidden_size, inner)
        for number, gate_up, down in zip(self.held, self.gate_up, self.down, strict=True):
            for part, target in (("gate", gate_up[:inner]), ("up", gate_up[inner:]), ("down", down)):
                whole = [range(size) for size in target.shape]
                weights.fill(target, f"{name}.{number}.{part}_proj.weight", tuple(target.shape), whole)
        weights.leave_out(3 * (count - len(self.held)))
        self.activate = weights.operators.silu_and_mul

    def __call__(self, x: torch.Tensor, factors: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        held, active = len(self.held), chosen.shape[1]
        if not held:
            return torch.zeros_like(x)
        expert = chosen.reshape(-1) - self.held.start
        elsewhere = (expert < 0) | (expert >= held)
        # What other ranks compute comes last, beyond every group: the products leave it out.
        expert, order = expert.masked_fill(elsewhere, held).sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(held, device=x.device), right=True, out_int32=True)
        rows = x.index_select(0, order // active)
        rows = self.activate(F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends))
        rows = F.grouped_mm(rows, self.down.transpose(1, 2), offs=ends)
        # Back in the order of the tokens; what was left out is whatever was there before.
        rows = torch.empty_like(rows).index_copy_(0, order, rows).masked_fill_(elsewhere[:, None], 0)
        return (rows.view(*chosen.shape, -1) * factors[..., None]).sum(1).to(x.dtype)


class MixtureOfExperts:
    """Routed experts, and perhaps a feed-forward block that every token goes through besides (Dai et al., 2024)."""

    def __init__(
        self, router: Router, experts: Experts, shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.experts(x, *self.router(x))
        if self.shared is not None:
            result += self.shared(x)
        return result
