"""DeepSeek-V2, V3 and R1 (DeepSeek-AI, 2024): multi-head latent attention, and after the first few layers experts of
which some are shared by all tokens and the others routed within groups."""

from __future__ import annotations

import torch

from ..attention.base import AttentionBackend
from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..layers.feed_forward import GatedFeedForward
from ..layers.grouped_routers import BiasedRouter, GroupLimitedRouter
from ..layers.latent_attention import MultiHeadLatentAttention
from ..layers.moe import Experts, MixtureOfExperts, Router
from ..layers.rotary import Rotary
from ..model import Model
from ..weights import WeightReader
from . import deepseek_settings
from .base import Family
from .decoder import FeedForward, LatentDecoder, dense_feed_forward


def build(config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> Model:
    """See `Family.build`."""
    latent = config.latent
    assert latent is not None
    rotary = Rotary(config.rope, latent.rope, weights.dtype, weights.device, latent.interleaved_rotary)
    return LatentDecoder(
        config,
        weights,
        backend,
        rotary,
        attention=lambda layer: attention(config, latent, layer, weights),
        feed_forward=lambda layer: feed_forward(config, layer, weights),
    )


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
        Experts(f"{name}.experts", experts.count, size, experts.intermediate_size, weights),
        shared,
    )


def router(name: str, hidden_size: int, experts: ExpertsConfig, weights: WeightReader) -> Router:
    """Routing is in float32 whatever the model's dtype: a rounded score would send tokens elsewhere."""
    weight = weights.tensor(f"{name}.weight", experts.count, hidden_size, dtype=torch.float32)
    if experts.scoring == "softmax":
        return GroupLimitedRouter(weight, experts)
    bias = weights.tensor(f"{name}.e_score_correction_bias", experts.count, dtype=torch.float32)
    return BiasedRouter(weight, bias, experts)


FAMILIES = tuple(
    Family(
        name=name,
        hugging_face=(architecture,),
        gguf=(),
        gguf_interleaved_rotary=False,
        config_from_hugging_face=config_from_hugging_face,
        config_from_gguf=None,
        build=build,
    )
    for name, architecture, config_from_hugging_face in (
        ("deepseek_v2", "DeepseekV2ForCausalLM", deepseek_settings.v2_from_hugging_face),
        ("deepseek_v3", "DeepseekV3ForCausalLM", deepseek_settings.v3_from_hugging_face),
    )
)
