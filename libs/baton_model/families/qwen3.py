"""Qwen3 (Yang et al., 2025): Llama's stack with queries and keys normalised head by head."""

from __future__ import annotations

from ..config import ModelConfig
from ..gguf_file import GgufFile
from ..settings import Settings
from . import decoder_settings, llama
from .base import Family


def config_from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have the defaults of transformers' `Qwen3Config`."""
    bias = settings.get("attention_bias", bool, False)
    return decoder_settings.from_hugging_face(
        settings,
        family="qwen3",
        context_length=32_768,
        head_dim=128,
        kv_heads=32,
        attention_bias=bias,
        attention_output_bias=bias,
        head_norm=True,
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say."""
    return decoder_settings.from_gguf(file, family="qwen3", head_norm=True)


FAMILY = Family(
    name="qwen3",
    hugging_face=("Qwen3ForCausalLM",),
    gguf=("qwen3",),
    gguf_interleaved_rotary=False,
    config_from_hugging_face=config_from_hugging_face,
    config_from_gguf=config_from_gguf,
    build=llama.build,
)
