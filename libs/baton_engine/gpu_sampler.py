"""Draws tokens from logits on a GPU, as `sampler` does on a CPU.

The same promise holds: a draw depends on the sequence's seed, the position and the sequence's own logits, and on
nothing that shares its step; the uniform number is the same hash. FlashInfer's own draws (sampling_from_probs and the
like) don't keep it: the row of the batch is part of their random numbers, whatever the seed. So FlashInfer divides by
the temperature and truncates, and the token is found by inverting the distribution that is left.

What differs: `sampler` truncates by rejection, so with top-k or top-p the same seed may give other tokens on a GPU than
on a CPU, of the same distribution. Without, it gives the same, but where the number falls within rounding of the border
between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baton_engine.errors import NonFiniteLogits
from baton_engine.messages import PositionLogprobs
from baton_engine.sampler import LEAST_TEMPERATURE, Draw, report_logprobs, uniform


class GpuSampler:
    """`kernels`: the module flashinfer. See `sampler.sample`."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __call__(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        finite = logits.amax(dim=-1).isfinite()
        # A kernel that searches for a threshold may not come to an end on what is no number.
        sane = logits.where(finite[:, None], 0.0)
        tokens = sane.argmax(dim=-1)
        random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
        if random:
            where = torch.tensor(random, device=logits.device)
            tokens = tokens.index_put((where,), self._sample_random(sane[where], [draws[row] for row in random]))
        # One wait for both.
        *chosen, all_finite = torch.cat((tokens, finite.all()[None].to(tokens.dtype))).tolist()
        if not all_finite:
            raise NonFiniteLogits("the largest logit of a row is NaN or infinite")
        return tuple(chosen), report_logprobs(logits, draws, chosen)

    def _sample_random(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        device, vocabulary = logits.device, logits.shape[-1]
        temperatures = [max(draw.sampling.temperature, LEAST_TEMPERATURE) for draw in draws]
        weights = self._kernels.softmax(logits, temperature=torch.tensor(temperatures, device=device))
        top_k = [min(draw.sampling.top_k or vocabulary, vocabulary) for draw in draws]
        if min(top_k) < vocabulary:
            limits = torch.tensor(top_k, dtype=torch.int32, device=device)
            weights = self._kernels.top_k_renorm_probs(weights, limits, is_deterministic=True)
        top_p = [draw.sampling.top_p for draw in draws]
        if min(top_p) < 1:
            # Of what top-k left, as everywhere.
            shares = torch.tensor(top_p, device=device)
            weights = self._kernels.top_p_renorm_probs(weights, shares, is_deterministic=True)
        numbers = [uniform(draw.sampling.seed, draw.position) for draw in draws]
        return invert(weights, torch.tensor(numbers, dtype=torch.float64, device=device))


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token [rows] at the share `numbers` (float64 [rows], in [0, 1)) of each row's mass, in order of ids.

    `weights`: float32 [rows, vocabulary], not negative; a token of weight 0 is never answered.
    """
    running = weights.double().cumsum(dim=-1)
    mass = running[:, -1:].contiguous()
    found = torch.searchsorted(running, numbers[:, None] * mass, right=True)
    # Rounding may put a number at the end; the last positive weight is meant then.
    return found.minimum(torch.searchsorted(running, mass)).squeeze(1)
