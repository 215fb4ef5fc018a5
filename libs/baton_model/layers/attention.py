"""Self-attention with grouped key-value heads (Ainslie et al., 2023) and rotary positions."""

from __future__ import annotations

import torch

from ..attention.base import AttentionStep
from ..config import ModelConfig
from ..shares import head_share, rows_of
from ..weights import WeightReader
from .norm import HeadNorm
from .rotary import Rotation


class GroupedQueryAttention:
    """`o(attention(rope(norm(q), norm(k)), v))`; most families have no norm there. The three projections are one
    matrix, so that they cost one product.

    A rank has a share of the heads: what it returns is its part of a sum over the ranks.
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightReader) -> None:
        share, size = head_share(config.heads, config.kv_heads, weights.group), config.head_dim
        rows = [config.heads * size, config.kv_heads * size, config.kv_heads * size]
        queries, keys = rows_of(share.queries, size), rows_of(share.keys, size)
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = len(share.queries), len(share.keys), size
        self.qkv = weights.column_parallel(
            [f"{name}.{part}_proj" for part in "qkv"],
            rows,
            [queries, keys, keys],
            config.hidden_size,
            config.attention_bias,
        )
        self.output = weights.row_parallel(
            f"{name}.o_proj", config.hidden_size, rows[0], queries, config.attention_output_bias
        )
        self.norm = self._head_norm(name, config, weights) if config.head_norm else None

    def _head_norm(self, name: str, config: ModelConfig, weights: WeightReader) -> HeadNorm:
        query, key = (weights.tensor(f"{name}.{part}_norm.weight", self.head_dim) for part in "qk")
        stacked = torch.stack([query] * self.heads + [key] * self.kv_heads)
        return HeadNorm(stacked, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AttentionStep) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        rotated = heads[:, : self.heads + self.kv_heads]
        # In place, so that keys and values stay side by side as the cache wants them.
        if self.norm is not None:
            self.norm(rotated)
        rotation(rotated)
        entries = heads[:, self.heads :].view(len(x), 2, self.kv_heads, self.head_dim)
        return self.output(attend(self.layer, heads[:, : self.heads], entries))
