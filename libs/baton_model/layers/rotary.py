"""Rotary position embedding (Su et al., 2021) and the ways to stretch it.

A head's dimensions i and i + head_dim/2 form a pair, or dimensions 2i and 2i + 1 where a model has them interleaved;
it is turned by `position * frequency[i]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..config import RopeConfig
from .operators import Operators


def frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle a position, in radians, of each pair of dimensions: float32 `[head_dim / 2]`.

    * default: `theta ** (-2i / head_dim)`.
    * linear (Chen et al., 2023): all divided by `factor`.
    * dynamic: as default. Its base grows only beyond the pretrained length, and with every further token, which would
      turn keys that lie in the cache already; the context is limited to the pretrained length instead, where the two
      are the same.
    * llama3: wavelengths beyond `original_context_length / low_frequency_factor` are stretched by `factor`, those
      below `original_context_length / high_frequency_factor` left alone, those between interpolated.
    * yarn (Peng et al., 2023): likewise, but between pairs that turn `beta_fast` and `beta_slow` times within
      `original_context_length`.
    """
    # In float32 and in this order of operations, as models are trained with: at position 10,000 a last-place
    # difference in a frequency is an angle of 0.001.
    base = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if config.frequency_divisors is not None:
        base = base / torch.tensor(config.frequency_divisors, dtype=torch.float32)
    if config.kind == "linear":
        base = base / config.factor
    elif config.kind == "llama3":
        low, high = config.low_frequency_factor, config.high_frequency_factor
        turns = config.original_context_length * base / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        base = keep * base + (1 - keep) * base / config.factor
    elif config.kind == "yarn":
        first, last = (_yarn_dimension(config, head_dim, beta) for beta in (config.beta_fast, config.beta_slow))
        if config.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # A ramp of no width would divide by zero.
        width = last - first if last != first else 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        base = (1 - ramp) * base + ramp * base / config.factor
    return base


def attention_factor(config: RopeConfig) -> float:
    """What cosine and sine are multiplied by: YaRN's temperature, 1 for every other kind."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def softmax_temperature(config: RopeConfig) -> float:
    """What DeepSeek's models multiply scores by besides: the square of YaRN's temperature at `mscale_all_dim`, which
    acts on all dimensions of a head where cosine and sine act on the rotated ones only."""
    if config.kind == "default" or not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def _yarn_dimension(config: RopeConfig, head_dim: int, turns: float) -> float:
    """The pair, as a fractional index, that turns so many times within the original context."""
    return head_dim * math.log(config.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def yarn_mscale(factor: float, mscale: float) -> float:
    """The temperature that YaRN gives attention at a stretch of `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine for the tokens of one forward pass, computed once and used by every layer."""

    cos: torch.Tensor
    sin: torch.Tensor
    operators: Operators
    interleaved: bool = False

    def __call__(self, x: torch.Tensor) -> None:
        """Turns `x [N, heads, head_dim]` in place."""
        if not self.interleaved:
            self.operators.rotate(x, self.cos, self.sin)
            return
        swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


class Rotary:
    """Makes a `Rotation` from positions. `interleaved`: pairs are neighbours."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        interleaved: bool = False,
    ) -> None:
        self._frequencies = frequencies(config, head_dim).to(device)
        self._factor = attention_factor(config)
        self._dtype = dtype
        self._operators = operators
        self._interleaved = interleaved

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """`positions`: int64 `[N]`."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        if self._interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos.to(self._dtype), sin.to(self._dtype), self._operators, self._interleaved)
