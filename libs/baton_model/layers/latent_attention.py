"""Multi-head latent attention with decoupled rotary keys (DeepSeek-AI, 2024: DeepSeek-V2, section 2.1)."""

from __future__ import annotations

import torch

from ..attention.base import LatentAttentionStep
from ..config import LatentConfig, ModelConfig
from ..shares import head_share, rows_of
from ..weights import WeightReader
from .latent import LatentHeads
from .rotary import Rotation, softmax_temperature

# The norms of the two latents don't follow the model's epsilon.
_LATENT_NORM_EPS = 1e-6


class MultiHeadLatentAttention:
    """Token x has one latent `c = norm(W_dkv x)` and one rotated key `k_r = rope(W_kr x)`, which all heads share and
    which the cache holds; each head has its own `q = W_uq norm(W_dq x)`, a part of it rotated, or where the model has
    no latent of queries `q = W_q x`. The products with W_dq, W_dkv and W_kr are one.

    A rank has a share of the heads: what it returns is its part of a sum over the ranks. The latents are whole on
    every rank.
    """

    def __init__(self, name: str, config: ModelConfig, latent: LatentConfig, layer: int, weights: WeightReader) -> None:
        heads = head_share(config.heads, 1, weights.group).queries
        key, up = latent.nope + latent.rope, latent.nope + latent.value
        self.layer, self.latent, self.key = layer, latent, key
        downs, rows = [f"{name}.kv_a_proj_with_mqa"], [latent.rank + latent.rope]
        source, columns = f"{name}.q_proj", config.hidden_size
        if latent.query_rank is not None:
            downs, rows = [f"{name}.q_a_proj", *downs], [latent.query_rank, *rows]
            source, columns = f"{name}.q_b_proj", latent.query_rank
            self.query_norm = weights.norm(f"{name}.q_a_layernorm", columns, _LATENT_NORM_EPS)
        self.down = weights.linear(downs, rows, config.hidden_size, config.attention_bias)
        self.queries = weights.column_parallel([source], [config.heads * key], [rows_of(heads, key)], columns, False)
        self.norm = weights.norm(f"{name}.kv_a_layernorm", latent.rank, _LATENT_NORM_EPS)
        ups = weights.part(
            f"{name}.kv_b_proj.weight", (config.heads * up, latent.rank), [rows_of(heads, up), range(latent.rank)]
        ).view(len(heads), up, latent.rank)
        self.heads = LatentHeads(
            key_up=ups[:, : latent.nope].contiguous(),
            value_up=ups[:, latent.nope :].transpose(1, 2).contiguous(),
            scale=key**-0.5 * softmax_temperature(config.rope),
        )
        self.output = weights.row_parallel(
            f"{name}.o_proj",
            config.hidden_size,
            config.heads * latent.value,
            rows_of(heads, latent.value),
            config.attention_output_bias,
        )

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: LatentAttentionStep) -> torch.Tensor:
        sizes, down = self.latent, self.down(x)
        source = x if sizes.query_rank is None else self.query_norm(down[:, : sizes.query_rank])
        queries = self.queries(source).view(len(x), -1, self.key)
        rotation(queries[..., sizes.nope :])
        entries = down[:, -(sizes.rank + sizes.rope) :]
        entries[:, : sizes.rank] = self.norm(entries[:, : sizes.rank])
        rotation(entries[:, None, sizes.rank :])
        return self.output(attend(self.layer, queries, entries, self.heads))
