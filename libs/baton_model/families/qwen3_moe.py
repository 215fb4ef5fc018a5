"""Qwen3-MoE (Yang et al., 2025), Qwen3-Coder among them: Qwen3 with experts in place of the feed-forward block of most
layers, chosen by a softmax over all of them."""

from __future__ import annotations

from ..attention.base import AttentionBackend
from ..config import ExpertsConfig, ModelConfig
from ..errors import InvalidConfig
from ..gguf_file import GgufFile
from ..layers.moe import MixtureOfExperts, SoftmaxRouter, routed_experts
from ..model import Model
from ..settings import Settings
from ..weights import WeightReader
from . import decoder_settings
from .base import Family
from .decoder import Decoder, FeedForward, dense_feed_forward, self_attention


def build(config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> Model:
    """See `Family.build`."""
    experts, dense = config.experts, dense_feed_forward(config, weights)
    assert experts is not None

    def feed_forward(layer: int) -> FeedForward:
        if layer not in experts.layers:
            return dense(layer)
        name = f"model.layers.{layer}.mlp"
        return MixtureOfExperts(
            SoftmaxRouter(
                weights.tensor(f"{name}.gate.weight", experts.count, config.hidden_size),
                experts.active,
                experts.normalised,
            ),
            routed_experts(f"{name}.experts", experts.count, config.hidden_size, experts.intermediate_size, weights),
        )

    return Decoder(config, weights, backend, self_attention(config, weights), feed_forward)


def config_from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have the defaults of transformers' `Qwen3MoeConfig`."""
    bias = settings.get("attention_bias", bool, False)
    # transformers 5 writes the second name, the published checkpoints have the first.
    count = "num_local_experts" if "num_local_experts" in settings else "num_experts"
    step, dense = settings.positive("decoder_sparse_step", 1), settings.integers("mlp_only_layers")
    return _checked(
        settings,
        decoder_settings.from_hugging_face(
            settings,
            family="qwen3_moe",
            context_length=32_768,
            kv_heads=4,
            window_everywhere=True,
            attention_bias=bias,
            attention_output_bias=bias,
            head_norm=True,
            experts=ExpertsConfig(
                count=settings.positive(count, 128),
                active=settings.positive("num_experts_per_tok", 8),
                intermediate_size=settings.positive("moe_intermediate_size", 768),
                normalised=settings.get("norm_topk_prob", bool, False),
                layers=frozenset(
                    layer
                    for layer in range(settings.positive("num_hidden_layers", most=decoder_settings.MOST_LAYERS))
                    if layer not in dense and (layer + 1) % step == 0
                ),
            ),
        ),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say."""
    settings = Settings(file.metadata, file.path, prefix=f"{file.architecture}.")
    return _checked(
        settings,
        decoder_settings.from_gguf(
            file,
            family="qwen3_moe",
            head_norm=True,
            experts=ExpertsConfig(
                count=settings.positive("expert_count"),
                active=settings.positive("expert_used_count"),
                intermediate_size=settings.positive("expert_feed_forward_length"),
                # llama.cpp always does so for this architecture.
                normalised=True,
                layers=frozenset(
                    layer
                    for layer in range(settings.positive("block_count", most=decoder_settings.MOST_LAYERS))
                    if f"blk.{layer}.ffn_gate_inp.weight" in file
                ),
            ),
        ),
    )


def _checked(settings: Settings, config: ModelConfig) -> ModelConfig:
    experts = config.experts
    if experts is not None and experts.active > experts.count:
        raise InvalidConfig(
            f"{settings.path}: a token goes through {experts.active} experts, of which there are {experts.count}",
            active=experts.active,
            experts=experts.count,
        )
    return config


FAMILY = Family(
    name="qwen3_moe",
    hugging_face=("Qwen3MoeForCausalLM",),
    gguf=("qwen3moe",),
    gguf_interleaved_rotary=False,
    config_from_hugging_face=config_from_hugging_face,
    config_from_gguf=config_from_gguf,
    build=build,
)
