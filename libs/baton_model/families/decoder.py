"""The stack that the families share: pre-norm layers on a residual stream, between an embedding and a head.

Every layer, on a residual stream x: x += attention(norm(x)), then x += feed_forward(norm(x)). Both blocks return a
rank's part of their result; the sum over the ranks is taken here, and makes x the same on all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from ..attention.base import AttentionBackend, AttentionStep, LatentAttentionStep
from ..batch import ForwardBatch
from ..cache import CacheShape, KvCache, LatentCache, PagedCache
from ..config import ModelConfig
from ..layers.attention import GroupedQueryAttention
from ..layers.feed_forward import GatedFeedForward
from ..layers.rotary import Rotary, Rotation
from ..model import Model
from ..shares import head_share
from ..weights import WeightReader

Step = TypeVar("Step", AttentionStep, LatentAttentionStep)
AnyStep_contra = TypeVar("AnyStep_contra", AttentionStep, LatentAttentionStep, contravariant=True)


class Attention(Protocol[AnyStep_contra]):
    """`[N, hidden_size]` to this rank's part of as much; stores the layer's new entries in the cache."""

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AnyStep_contra) -> torch.Tensor: ...


class FeedForward(Protocol):
    """`[N, hidden_size]` to this rank's part of as much."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DecoderLayer(Generic[Step]):
    """One layer of the stack, its parameters under `model.layers.{layer}`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: WeightReader,
        attention: Attention[Step],
        feed_forward: FeedForward,
    ) -> None:
        name, size, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.attention_norm = weights.norm(f"{name}.input_layernorm", size, eps)
        self.attention: Attention[Step] = attention
        self.feed_forward_norm = weights.norm(f"{name}.post_attention_layernorm", size, eps)
        self.feed_forward = feed_forward

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attend: Step,
        total: Callable[[torch.Tensor], torch.Tensor],
        stored: Callable[[], None],
    ) -> torch.Tensor:
        """The stream x `[N, hidden_size]`, changed. `total` sums over the ranks; `stored()` is called once every rank's
        entries are in the pages: after the sum over what attention gave."""
        x += total(self.attention(self.attention_norm(x), rotation, attend))
        stored()
        x += total(self.feed_forward(self.feed_forward_norm(x)))
        return x


class LayerStack(Model, Generic[Step]):
    """The whole model. A family says what the blocks of layer l are: `attention(l)`, `feed_forward(l)`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: AttentionBackend,
        rotary: Rotary,
        attention: Callable[[int], Attention[Step]],
        feed_forward: Callable[[int], FeedForward],
    ) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.group = weights.group
        self.rank_kv_heads = len(head_share(config.heads, config.kv_heads, weights.group).keys)
        self.rotary = rotary
        self.backend = backend
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer[Step]] = [
            DecoderLayer(config, layer, weights, attention(layer), feed_forward(layer))
            for layer in range(config.layers)
        ]
        self.norm = weights.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = (
            weights.tied_head("lm_head", self.embedding, config.vocab_size, config.hidden_size)
            if config.tied_embeddings
            else weights.head("lm_head", config.vocab_size, config.hidden_size)
        )

    @abstractmethod
    def plan(self, batch: ForwardBatch, cache: PagedCache) -> Step:
        """Attention over this cache. Raises `InvalidBatch` where batch or cache doesn't fit the model."""

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: PagedCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """See `Model.forward`."""
        attend = self.plan(batch, cache)
        rotation = self.rotary(batch.positions)
        x = self.embedding(batch.token_ids)
        for number, layer in enumerate(self.layers):
            stored = nothing if on_layer is None else partial(on_layer, number)
            x = layer(x, rotation, attend, self.group.all_reduce, stored)
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden)


class Decoder(LayerStack[AttentionStep]):
    """A stack over a cache of keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: AttentionBackend,
        attention: Callable[[int], Attention[AttentionStep]],
        feed_forward: Callable[[int], FeedForward],
    ) -> None:
        rotary = Rotary(config.rope, config.head_dim, weights.dtype, weights.device, weights.operators)
        super().__init__(config, weights, backend, rotary, attention, feed_forward)

    def plan(self, batch: ForwardBatch, cache: PagedCache) -> AttentionStep:
        """See `LayerStack.plan`."""
        return self.backend.plan(batch, self.check(batch, cache, KvCache))


class LatentDecoder(LayerStack[LatentAttentionStep]):
    """A stack over a latent cache."""

    @property
    def cache_shape(self) -> CacheShape:
        """See `Model.cache_shape`."""
        return CacheShape(self.config.layers, 1, self.config.head_dim, latent=True)

    def plan(self, batch: ForwardBatch, cache: PagedCache) -> LatentAttentionStep:
        """See `LayerStack.plan`."""
        return self.backend.plan_latent(batch, self.check(batch, cache, LatentCache))


def nothing() -> None:
    """What is done with a layer that nobody waits for."""


def self_attention(config: ModelConfig, weights: WeightReader) -> Callable[[int], GroupedQueryAttention]:
    """Grouped-query attention in every layer."""
    return lambda layer: GroupedQueryAttention(f"model.layers.{layer}.self_attn", config, layer, weights)


def dense_feed_forward(config: ModelConfig, weights: WeightReader) -> Callable[[int], GatedFeedForward]:
    """A feed-forward block in every layer."""
    return lambda layer: GatedFeedForward(
        f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias, weights
    )
