"""Qwen2 and 2.5 (Yang et al., 2024): Llama's stack with a bias on the projections of queries, keys and values."""

from __future__ import annotations

from ..config import ModelConfig
from ..gguf_file import GgufFile
from ..settings import Settings
from . import decoder_settings, llama
from .base import Family


def config_from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have the defaults of transformers' `Qwen2Config`."""
    return decoder_settings.from_hugging_face(
        settings, family="qwen2", context_length=32_768, kv_heads=32, attention_bias=True
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say."""
    return decoder_settings.from_gguf(file, family="qwen2")


FAMILY = Family(
    name="qwen2",
    hugging_face=("Qwen2ForCausalLM",),
    gguf=("qwen2",),
    gguf_interleaved_rotary=False,
    config_from_hugging_face=config_from_hugging_face,
    config_from_gguf=config_from_gguf,
    build=llama.build,
)
