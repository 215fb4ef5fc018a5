"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024): grouped-query attention and SwiGLU."""

from __future__ import annotations

from ..attention.base import AttentionBackend
from ..config import ModelConfig
from ..errors import InvalidConfig
from ..gguf_file import GgufFile
from ..layers.attention import GroupedQueryAttention
from ..layers.feed_forward import GatedFeedForward
from ..model import Model
from ..settings import Settings
from ..weights import WeightReader
from . import rope_settings
from .base import Family
from .decoder import Decoder


def build(config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> Model:
    """See `Family.build`."""
    return Decoder(
        config,
        weights,
        backend,
        attention=lambda layer: GroupedQueryAttention(f"model.layers.{layer}.self_attn", config, layer, weights),
        feed_forward=lambda layer: GatedFeedForward(
            f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias, weights
        ),
    )


def config_from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have the defaults of transformers' `LlamaConfig`."""
    if settings.get("hidden_act", str, "silu") != "silu":
        raise settings.invalid("hidden_act", "Llama's activation is 'silu'")
    hidden_size, heads = settings.positive("hidden_size"), settings.positive("num_attention_heads")
    context_length = settings.positive("max_position_embeddings", 2048)
    return _checked(
        settings,
        ModelConfig(
            family="llama",
            vocab_size=settings.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=settings.positive("intermediate_size"),
            layers=settings.positive("num_hidden_layers"),
            heads=heads,
            kv_heads=settings.positive("num_key_value_heads", heads),
            head_dim=settings.positive("head_dim", hidden_size // heads),
            context_length=context_length,
            rms_norm_eps=settings.get("rms_norm_eps", float, 1e-6),
            rope=rope_settings.from_hugging_face(settings, 10_000.0, context_length),
            tied_embeddings=settings.get("tie_word_embeddings", bool, False),
            attention_bias=settings.get("attention_bias", bool, False),
            attention_output_bias=settings.get("attention_bias", bool, False),
            mlp_bias=settings.get("mlp_bias", bool, False),
            bos_token_id=(settings.integers("bos_token_id") or (None,))[0],
            eos_token_ids=settings.integers("eos_token_id"),
        ),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say."""
    settings = Settings(file.metadata, file.path, prefix=f"{file.architecture}.")
    hidden_size, heads = settings.positive("embedding_length"), settings.positive("attention.head_count")
    head_dim = settings.positive("attention.key_length", hidden_size // heads)
    context_length = settings.positive("context_length")
    return _checked(
        settings,
        ModelConfig(
            family="llama",
            vocab_size=file.shape("token_embd.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=settings.positive("feed_forward_length"),
            layers=settings.positive("block_count"),
            heads=heads,
            kv_heads=settings.positive("attention.head_count_kv", heads),
            head_dim=head_dim,
            context_length=context_length,
            rms_norm_eps=settings.get("attention.layer_norm_rms_epsilon", float),
            rope=rope_settings.from_gguf(file, settings, head_dim, context_length),
            tied_embeddings="output.weight" not in file,
            attention_bias="blk.0.attn_q.bias" in file,
            attention_output_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_gate.bias" in file,
            bos_token_id=(file.settings.integers("tokenizer.ggml.bos_token_id") or (None,))[0],
            eos_token_ids=file.settings.integers("tokenizer.ggml.eos_token_id"),
        ),
    )


def _checked(settings: Settings, config: ModelConfig) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise InvalidConfig(
            f"{settings.path}: {config.heads} query heads cannot share {config.kv_heads} KV heads evenly",
            heads=config.heads,
            kv_heads=config.kv_heads,
        )
    if config.head_dim % 2:
        raise InvalidConfig(
            f"{settings.path}: head_dim is {config.head_dim}; it must be even", head_dim=config.head_dim
        )
    return config


FAMILY = Family(
    name="llama",
    hugging_face=("LlamaForCausalLM",),
    gguf=("llama",),
    gguf_interleaved_rotary=True,
    config_from_hugging_face=config_from_hugging_face,
    config_from_gguf=config_from_gguf,
    build=build,
)
