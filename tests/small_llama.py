"""Small random Llama checkpoints, written as a Hugging Face directory or as GGUF, without transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file


@dataclass
class SmallLlama:
    """Sizes, and the random weights that go with them, under Hugging Face names."""

    layers: int = 2
    hidden: int = 32
    inner: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 64
    context: int = 128
    tied: bool = True
    bias: bool = False
    seed: int = 0
    state: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)

        def draw(*shape: int) -> np.ndarray:
            return random.normal(0, 0.15, shape).astype(np.float32)

        self.state["model.embed_tokens.weight"] = draw(self.vocabulary, self.hidden)
        self.state["model.norm.weight"] = 1 + draw(self.hidden)
        if not self.tied:
            self.state["lm_head.weight"] = draw(self.vocabulary, self.hidden)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.state[f"{name}.{norm}.weight"] = 1 + draw(self.hidden)
            for linear, rows, columns in (
                ("self_attn.q_proj", q, self.hidden),
                ("self_attn.k_proj", kv, self.hidden),
                ("self_attn.v_proj", kv, self.hidden),
                ("self_attn.o_proj", self.hidden, q),
                ("mlp.gate_proj", self.inner, self.hidden),
                ("mlp.up_proj", self.inner, self.hidden),
                ("mlp.down_proj", self.hidden, self.inner),
            ):
                self.state[f"{name}.{linear}.weight"] = draw(rows, columns)
                if self.bias:
                    self.state[f"{name}.{linear}.bias"] = draw(rows)

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.bias,
            "mlp_bias": self.bias,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
        }

    def write_hugging_face(self, directory: Path, shards: int = 1, **settings: Any) -> Path:
        """Writes config.json, with `settings` in place of the usual ones (None removes one), and safetensors."""
        directory.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in (self.config() | settings).items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(self.state, directory / "model.safetensors")
            return directory
        weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(self.state)}
        for shard in set(weight_map.values()):
            save_file({name: self.state[name] for name in weight_map if weight_map[name] == shard}, directory / shard)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    def write_gguf(
        self,
        path: Path,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        architecture: str = "llama",
        extra: dict[str, np.ndarray] | None = None,
        vocabulary: list[str] | None = None,
        **metadata: float | str,
    ) -> Path:
        """Writes GGUF as llama.cpp's converter does; matrices are stored as `kind`. `metadata`: more keys of the
        architecture, with __ for a dot; `extra`: more tensors."""
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if vocabulary is not None:
            writer.add_token_list(vocabulary)
            writer.add_token_types([1] * len(vocabulary))
            writer.add_token_scores([0.5 * i for i in range(len(vocabulary))])
        for key, value in metadata.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            if isinstance(value, int):
                add = writer.add_uint32
            add(f"{architecture}.{key.replace('__', '.')}", value)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, self.layers)
        for name, tensor in self.state.items():
            stored = tensor
            for projection, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads)):
                if projection in name and architecture == "llama":
                    # As in llama.cpp's convert_hf_to_gguf.py: halves become neighbours.
                    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
                    stored = split.swapaxes(1, 2).reshape(tensor.shape)
            used = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(
                names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quantize(stored, used), raw_dtype=used
            )
        for name, tensor in (extra or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
