"""How DeepSeek's models route: experts come in groups, and a token's are taken from the best few groups only, so that
they lie on few nodes (DeepSeek-AI, 2024: DeepSeek-V2, section 2.2.2; DeepSeek-V3, sections 2.1.2 and 2.1.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class GroupLimitedRouter:
    """DeepSeek-V2: affinities are a softmax over all experts, a group counts as much as its best expert. With one group
    this is the plain choice of the most likely. weight: float32 `[experts, hidden_size]`. See `moe.Router`."""

    weight: torch.Tensor
    config: ExpertsConfig

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        scores = F.linear(x.to(torch.float32), self.weight).softmax(-1)
        groups = scores.view(len(x), config.groups, -1).amax(-1)
        factors, experts = _within_groups(scores, groups, config.active_groups).topk(config.active, -1)
        return _scaled(factors, config).to(x.dtype), experts


@dataclass(frozen=True, slots=True)
class BiasedRouter:
    """DeepSeek-V3: affinities are sigmoids; a bias an expert, which training moved until the load was even, is added
    for the choice but not for the factors; a group counts as much as its two best experts together.

    weight: float32 `[experts, hidden_size]`; bias: float32 `[experts]`. See `moe.Router`.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    config: ExpertsConfig

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        scores = F.linear(x.to(torch.float32), self.weight).sigmoid()
        biased = scores + self.bias
        groups = biased.view(len(x), config.groups, -1).topk(2, -1).values.sum(-1)
        experts = _within_groups(biased, groups, config.active_groups).topk(config.active, -1).indices
        return _scaled(scores.gather(1, experts), config).to(x.dtype), experts


def _within_groups(scores: torch.Tensor, groups: torch.Tensor, active: int) -> torch.Tensor:
    """Scores `[N, experts]`, minus infinity outside the `active` best of the groups `[N, groups]`."""
    if active == groups.shape[1]:
        return scores
    closed = torch.ones_like(groups, dtype=torch.bool).scatter_(1, groups.topk(active, -1).indices, False)
    return scores.view(*groups.shape, -1).masked_fill(closed[..., None], float("-inf")).flatten(1)


def _scaled(factors: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    if config.normalised:
        factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
    return factors * config.scaling
