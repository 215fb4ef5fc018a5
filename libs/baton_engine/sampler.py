"""Draws tokens from logits, for a whole batch at once.

A draw depends on the sequence's seed, the position and the sequence's own logits, never on what shares its step or on
earlier draws: a uniform number is hashed from (seed, position, attempt). So the same seed gives the same tokens alone
and in a batch, and after a restart elsewhere.

Truncation (top-k, top-p) needs no sort: the native kernel says how. A row of 49,152 logits takes
15 us on one core, with top-k and top-p at once 40, where sorting it takes 3,000.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from baton_engine.errors import NonFiniteLogits
from baton_engine.messages import PositionLogprobs, Sampling, TokenLogprob
from baton_model import _kernels

# Rows of log-probabilities that are worked on at a time. 32 rows of 49,152 take 6 MB an operation, which the allocator
# takes from the kernel and gives back each time.
_ROWS = 8
# Below it the best token has all the mass anyway, and above it logits stay finite when divided by it.
LEAST_TEMPERATURE = 1e-5
_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw: the token for `position` (0 is the first of the prompt)."""

    sampling: Sampling
    position: int


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
    """Draws one token a row. `logits`: float32 [len(draws), vocabulary].

    Returns the tokens, and log-probabilities of the unmodified distribution for the rows that asked (empty if none
    did). Raises NonFiniteLogits.
    """
    samplings = [draw.sampling for draw in draws]
    logits = logits.contiguous()
    tokens = _kernels.draw(
        logits.data_ptr(),
        logits.shape[1],
        [max(each.temperature, LEAST_TEMPERATURE) if each.temperature > 0 else 0.0 for each in samplings],
        [each.top_p for each in samplings],
        [each.top_k for each in samplings],
        [each.seed & _MASK for each in samplings],
        [draw.position for draw in draws],
        torch.get_num_threads(),
    )
    if min(tokens) < 0:
        raise NonFiniteLogits("the largest logit of a row is NaN or infinite")
    return tuple(tokens), report_logprobs(logits, draws, tokens)


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """A number in [0, 1) hashed from its arguments (splitmix64's finaliser, applied to each in turn)."""
    return _kernels.uniform(seed & _MASK, position, attempt)


def report_logprobs(
    logits: torch.Tensor, draws: Sequence[Draw], tokens: Sequence[int]
) -> tuple[PositionLogprobs | None, ...]:
    """Of the unmodified distribution, for the rows that asked; empty if none did."""
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not wanted:
        return ()
    found: list[PositionLogprobs | None] = [None] * len(draws)
    for start in range(0, len(wanted), _ROWS):
        rows = wanted[start : start + _ROWS]
        logprobs = logits[rows].log_softmax(dim=-1)
        for row, values in zip(rows, logprobs, strict=True):
            best = values.topk(min(draws[row].sampling.logprobs or 0, len(values)))
            found[row] = PositionLogprobs(
                TokenLogprob(tokens[row], float(values[tokens[row]])),
                tuple(map(TokenLogprob, best.indices.tolist(), best.values.tolist())),
            )
    return tuple(found)
