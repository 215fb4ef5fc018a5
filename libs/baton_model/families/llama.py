"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024).

Every layer, on a residual stream x: x += o(attention(rope(q, k), v)) of norm(x), then x += down(silu(gate) * up) of
norm(x). The three projections of attention are one matrix, as are gate and up: each costs one product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend, AttentionStep
from ..batch import ForwardBatch
from ..cache import KvCache
from ..config import ModelConfig
from ..errors import InvalidConfig
from ..gguf_file import GgufFile
from ..layers.linear import Linear
from ..layers.rotary import Rotary, Rotation
from ..model import Model
from ..settings import Settings
from ..weights import WeightReader
from . import rope_settings
from .base import Family


class LlamaAttention:
    """Self-attention with grouped key-value heads and rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightReader) -> None:
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        name = f"model.layers.{layer}.self_attn"
        rows = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
        self.qkv = weights.linear(
            [f"{name}.{part}_proj" for part in "qkv"], rows, config.hidden_size, config.attention_bias
        )
        self.output = weights.linear([f"{name}.o_proj"], [config.hidden_size], rows[0], config.attention_bias)

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AttentionStep) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        # In place, so that keys and values stay side by side as the cache wants them.
        rotation(heads[:, :rotated])
        entries = heads[:, self.heads :].view(len(x), 2, self.kv_heads, self.head_dim)
        return self.output(attend(self.layer, heads[:, : self.heads], entries))


class LlamaFeedForward:
    """SwiGLU."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightReader) -> None:
        name, inner = f"model.layers.{layer}.mlp", config.intermediate_size
        self.gate_up = weights.linear(
            [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], config.hidden_size, config.mlp_bias
        )
        self.down = weights.linear([f"{name}.down_proj"], [config.hidden_size], inner, config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class LlamaLayer:
    """One layer of the stack."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightReader) -> None:
        name = f"model.layers.{layer}"
        self.attention_norm = weights.norm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(config, layer, weights)
        self.feed_forward_norm = weights.norm(
            f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.feed_forward = LlamaFeedForward(config, layer, weights)


class Llama(Model):
    """The whole decoder."""

    def __init__(self, config: ModelConfig, weights: WeightReader, backend: AttentionBackend) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.backend = backend
        self.embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim, weights.dtype, weights.device)
        self.layers = [LlamaLayer(config, layer, weights) for layer in range(config.layers)]
        self.norm = weights.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = (
            Linear(self.embedding)
            if config.tied_embeddings
            else weights.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: KvCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """See `Model.forward`."""
        self.check(batch, cache)
        attend = self.backend.plan(batch, cache)
        rotation = self.rotary(batch.positions)
        x = F.embedding(batch.token_ids, self.embedding)
        for layer in self.layers:
            x += layer.attention(layer.attention_norm(x), rotation, attend)
            if on_layer is not None:
                on_layer(layer.attention.layer)
            x += layer.feed_forward(layer.feed_forward_norm(x))
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden).to(torch.float32)


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
    build=Llama,
)
