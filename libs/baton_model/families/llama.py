"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024): grouped-query attention and SwiGLU."""

from __future__ import annotations

from ..attention.base import AttentionBackend
from ..config import ModelConfig
from ..gguf_file import GgufFile
from ..model import Model
from ..settings import Settings
from ..weights import WeightReader
from . import decoder_settings
from .base import Family
from .decoder import Decoder, dense_feed_forward, self_attention


def build(config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> Model:
    """See `Family.build`."""
    return Decoder(config, weights, backend, self_attention(config, weights), dense_feed_forward(config, weights))


def config_from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have the defaults of transformers' `LlamaConfig`."""
    bias = settings.get("attention_bias", bool, False)
    return decoder_settings.from_hugging_face(
        settings,
        family="llama",
        context_length=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=settings.get("mlp_bias", bool, False),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say."""
    return decoder_settings.from_gguf(file, family="llama")


FAMILY = Family(
    name="llama",
    hugging_face=("LlamaForCausalLM",),
    gguf=("llama",),
    gguf_interleaved_rotary=True,
    config_from_hugging_face=config_from_hugging_face,
    config_from_gguf=config_from_gguf,
    build=build,
)
