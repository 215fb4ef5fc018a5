"""The stack that the families share: pre-norm layers on a residual stream, between an embedding and a head.

Every layer, on a residual stream x: x += attention(norm(x)), then x += feed_forward(norm(x)). Both blocks return a
rank's part of their result; the sum over the ranks is taken here, and makes x the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..attention.base import AttentionBackend, AttentionStep
from ..batch import ForwardBatch
from ..cache import KvCache, PagedCache
from ..config import ModelConfig
from ..layers.attention import GroupedQueryAttention
from ..layers.feed_forward import GatedFeedForward
from ..layers.rotary import Rotary, Rotation
from ..model import Model
from ..shares import head_share
from ..weights import WeightReader


class Attention(Protocol):
    """`[N, hidden_size]` to this rank's part of as much; stores the layer's new entries in the cache."""

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AttentionStep) -> torch.Tensor: ...


class FeedForward(Protocol):
    """`[N, hidden_size]` to this rank's part of as much."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DecoderLayer:
    """One layer of the stack, its parameters under `model.layers.{layer}`."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: WeightReader, attention: Attention, feed_forward: FeedForward
    ) -> None:
        name, size, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.attention_norm = weights.norm(f"{name}.input_layernorm", size, eps)
        self.attention = attention
        self.feed_forward_norm = weights.norm(f"{name}.post_attention_layernorm", size, eps)
        self.feed_forward = feed_forward


class Decoder(Model):
    """The whole model. A family says what the blocks of layer l are: `attention(l)`, `feed_forward(l)`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: AttentionBackend,
        attention: Callable[[int], Attention],
        feed_forward: Callable[[int], FeedForward],
    ) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.group = weights.group
        self.rank_kv_heads = len(head_share(config.heads, config.kv_heads, weights.group).keys)
        self.backend = backend
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim, weights.dtype, weights.device)
        self.layers = [
            DecoderLayer(config, layer, weights, attention(layer), feed_forward(layer))
            for layer in range(config.layers)
        ]
        self.norm = weights.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = (
            weights.tied_head(self.embedding)
            if config.tied_embeddings
            else weights.head("lm_head", config.vocab_size, config.hidden_size)
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: PagedCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """See `Model.forward`."""
        attend = self.backend.plan(batch, self.check(batch, cache, KvCache))
        rotation = self.rotary(batch.positions)
        x = self.embedding(batch.token_ids)
        total = self.group.all_reduce
        for number, layer in enumerate(self.layers):
            x += total(layer.attention(layer.attention_norm(x), rotation, attend))
            # After the sum: every rank's entries are in the pages then.
            if on_layer is not None:
                on_layer(number)
            x += total(layer.feed_forward(layer.feed_forward_norm(x)))
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden)


def self_attention(config: ModelConfig, weights: WeightReader) -> Callable[[int], GroupedQueryAttention]:
    """Grouped-query attention in every layer."""
    return lambda layer: GroupedQueryAttention(f"model.layers.{layer}.self_attn", config, layer, weights)


def dense_feed_forward(config: ModelConfig, weights: WeightReader) -> Callable[[int], GatedFeedForward]:
    """A feed-forward block in every layer."""
    return lambda layer: GatedFeedForward(
        f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias, weights
    )
