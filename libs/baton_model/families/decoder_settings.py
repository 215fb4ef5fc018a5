"""The settings that all families of this stack have in common, as the two kinds of checkpoints spell them."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..errors import InvalidConfig
from ..gguf_file import GgufFile
from ..settings import Settings
from . import rope_settings

# Far beyond any model that there is: what has more is a slip of the pen, to be told before anything is made of it.
MOST_LAYERS = 10_000
MOST_HEAD_DIM = 1 << 16


def from_hugging_face(
    settings: Settings,
    *,
    family: str,
    context_length: int,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    window_everywhere: bool = False,
    **switches: Any,
) -> ModelConfig:
    """From config.json. `context_length`, `head_dim` and `kv_heads` are the family's defaults for absent settings
    (None: the hidden size divided by the heads; as many as query heads), `switches` further fields of `ModelConfig`.
    `window_everywhere`: where a sliding window is in use, every layer has it, whatever else is said of layers.

    Raises `InvalidConfig`."""
    if settings.get("hidden_act", str, "silu") != "silu":
        raise settings.invalid("hidden_act", "the family's activation is 'silu'")
    hidden_size, heads = settings.positive("hidden_size"), settings.positive("num_attention_heads")
    context_length = settings.positive("max_position_embeddings", context_length)
    config = ModelConfig(
        family=family,
        vocab_size=settings.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.positive("intermediate_size"),
        layers=settings.positive("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=settings.positive("num_key_value_heads", kv_heads or heads),
        head_dim=settings.positive("head_dim", head_dim or hidden_size // heads, most=MOST_HEAD_DIM),
        context_length=context_length,
        rms_norm_eps=settings.above("rms_norm_eps", 0, 1e-6),
        rope=rope_settings.from_hugging_face(settings, 10_000.0, context_length),
        tied_embeddings=settings.get("tie_word_embeddings", bool, False),
        bos_token_id=(settings.integers("bos_token_id") or (None,))[0],
        eos_token_ids=settings.integers("eos_token_id"),
        **switches,
    )
    _refuse_sliding_windows(settings, config, window_everywhere)
    return _checked(settings, config)


def from_gguf(file: GgufFile, *, family: str, rotated: int | None = None, **switches: Any) -> ModelConfig:
    """From a file's metadata, and from which tensors it has where the metadata doesn't say. `rotated`: how many
    dimensions of a head are rotated (None: all); `switches`: further fields of `ModelConfig`.

    Raises `InvalidConfig`."""
    settings = Settings(file.metadata, file.path, prefix=f"{file.architecture}.")
    hidden_size, heads = settings.positive("embedding_length"), settings.positive("attention.head_count")
    head_dim = settings.positive("attention.key_length", hidden_size // heads, most=MOST_HEAD_DIM)
    context_length = settings.positive("context_length")
    if "attention.sliding_window" in settings and settings.get("attention.sliding_window", int) < context_length:
        raise settings.invalid("attention.sliding_window", "attention over a part of the context is not supported")
    return _checked(
        settings,
        ModelConfig(
            family=family,
            vocab_size=file.shape("token_embd.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=settings.positive("feed_forward_length"),
            layers=settings.positive("block_count", most=MOST_LAYERS),
            heads=heads,
            kv_heads=settings.positive("attention.head_count_kv", heads),
            head_dim=head_dim,
            context_length=context_length,
            rms_norm_eps=settings.above("attention.layer_norm_rms_epsilon", 0),
            rope=rope_settings.from_gguf(file, settings, rotated or head_dim, context_length),
            tied_embeddings="output.weight" not in file,
            attention_bias="blk.0.attn_q.bias" in file,
            attention_output_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_gate.bias" in file,
            bos_token_id=(file.settings.integers("tokenizer.ggml.bos_token_id") or (None,))[0],
            eos_token_ids=file.settings.integers("tokenizer.ggml.eos_token_id"),
            **switches,
        ),
    )


def _refuse_sliding_windows(settings: Settings, config: ModelConfig, everywhere: bool) -> None:
    """A window changes nothing where no layer has it, or where it holds the whole context. Absent settings have the
    defaults of transformers' Qwen configurations."""
    kinds = settings.strings("layer_types")
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise settings.invalid("layer_types", "a layer's attention is over the whole context, or over a window of it")
    if everywhere:
        windowed = True
    elif kinds:
        windowed = "sliding_attention" in kinds
    else:
        windowed = settings.get("max_window_layers", int, 28) < config.layers
    if not windowed or not settings.get("use_sliding_window", bool, False):
        return
    window = settings.optional("sliding_window", 4096)
    if window is not None and window < config.context_length:
        raise settings.invalid(
            "sliding_window", f"attention over a part of the context, here {window} tokens, is not supported"
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
