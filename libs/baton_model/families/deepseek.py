"""DeepSeek-V2, V3 and R1 (DeepSeek-AI, 2024): multi-head latent attention, and after the first few layers experts of
which some are shared by all tokens and the others routed within groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ..attention.base import AttentionBackend, LatentAttentionStep
from ..batch import ForwardBatch
from ..cache import CacheShape, PagedCache
from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..errors import InvalidBatch
from ..layers.feed_forward import GatedFeedForward
from ..layers.grouped_routers import BiasedRouter, GroupLimitedRouter
from ..layers.latent_attention import MultiHeadLatentAttention
from ..layers.moe import MixtureOfExperts, Router, routed_experts
from ..layers.rotary import Rotary
from ..model import DraftModule
from ..weights import WeightReader
from . import deepseek_settings
from .base import Family
from .decoder import DecoderLayer, FeedForward, LatentDecoder, dense_feed_forward, nothing


class Deepseek(LatentDecoder):
    """The whole model, with as many modules for multi-token prediction as `config.mtp_layers` says."""

    def __init__(self, config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> None:
        latent = config.latent
        assert latent is not None
        super().__init__(
            config,
            weights,
            backend,
            Rotary(
                config.rope, latent.rope, weights.dtype, weights.device, weights.operators, latent.interleaved_rotary
            ),
            attention=lambda layer: attention(config, latent, layer, weights),
            feed_forward=lambda layer: feed_forward(config, layer, weights),
        )
        self.mtp = [
            MtpModule(self, latent, layer, weights) for layer in range(config.layers, config.layers + config.mtp_layers)
        ]

    @property
    def cache_shape(self) -> CacheShape:
        """See `Model.cache_shape`: a layer more for each module."""
        return replace(super().cache_shape, layers=self.config.layers + self.config.mtp_layers)


class MtpModule(DraftModule):
    """`shared_head.norm(layer(eh_proj([enorm(embedding of the next token), hnorm(hidden state)])))`, with a layer like
    the model's last. Checkpoints call it the layer after those of the model; embedding and head are the model's own,
    of which they hold copies."""

    def __init__(self, model: Deepseek, latent: LatentConfig, layer: int, weights: WeightReader) -> None:
        config, name = model.config, f"model.layers.{layer}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self._model = model
        self._number = layer
        self._embedding_norm = weights.norm(f"{name}.enorm", size, eps)
        self._hidden_norm = weights.norm(f"{name}.hnorm", size, eps)
        self._projection = weights.linear([f"{name}.eh_proj"], [size], 2 * size, bias=False)
        self._layer: DecoderLayer[LatentAttentionStep] = DecoderLayer(
            config, layer, weights, attention(config, latent, layer, weights), feed_forward(config, layer, weights)
        )
        self._norm = weights.norm(f"{name}.shared_head.norm", size, eps)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedCache,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """See `DraftModule.forward`."""
        model, count = self._model, len(batch.token_ids)
        if hidden.shape != (count, model.config.hidden_size) or next_token_ids.shape != (count,):
            raise InvalidBatch(
                f"hidden states {list(hidden.shape)} and next tokens {list(next_token_ids.shape)} don't belong to a "
                f"batch of {count} tokens and a model of size {model.config.hidden_size}"
            )
        attend = model.plan(batch, cache)
        embedded = self._embedding_norm(model.embedding(next_token_ids))
        x = self._projection(torch.cat((embedded, self._hidden_norm(hidden)), dim=-1))
        stored = nothing if on_layer is None else partial(on_layer, self._number)
        return self._norm(self._layer(x, model.rotary(batch.positions), attend, model.group.all_reduce, stored))


def attention(config: ModelConfig, latent: LatentConfig, layer: int, weights: WeightReader) -> MultiHeadLatentAttention:
    """Of layer `layer`."""
    return MultiHeadLatentAttention(f"model.layers.{layer}.self_attn", config, latent, layer, weights)


def feed_forward(config: ModelConfig, layer: int, weights: WeightReader) -> FeedForward:
    """Of layer `layer`: experts, or in the first layers a dense block."""
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return dense_feed_forward(config, weights)(layer)
    name, size = f"model.layers.{layer}.mlp", config.hidden_size
    shared = None
    if experts.shared_size:
        shared = GatedFeedForward(f"{name}.shared_experts", size, experts.shared_size, config.mlp_bias, weights)
    return MixtureOfExperts(
        router(f"{name}.gate", size, experts, weights),
        routed_experts(f"{name}.experts", experts.count, size, experts.intermediate_size, weights),
        shared,
    )


def router(name: str, hidden_size: int, experts: ExpertsConfig, weights: WeightReader) -> Router:
    """Routing is in float32 whatever the model's dtype: a rounded score would send tokens elsewhere."""
    weight = weights.tensor(f"{name}.weight", experts.count, hidden_size, dtype=torch.float32)
    if experts.scoring == "softmax":
        return GroupLimitedRouter(weight, experts)
    bias = weights.tensor(f"{name}.e_score_correction_bias", experts.count, dtype=torch.float32)
    return BiasedRouter(weight, bias, experts)


FAMILY = Family(
    name="deepseek",
    hugging_face=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    gguf=("deepseek2",),
    gguf_interleaved_rotary=False,
    config_from_hugging_face=deepseek_settings.from_hugging_face,
    config_from_gguf=deepseek_settings.from_gguf,
    build=Deepseek,
)
