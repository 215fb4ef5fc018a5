"""Small random checkpoints, written as Hugging Face directories or as GGUF, without transformers.

`SmallModel(family, ...)` is a model of one of the families with keys and values. With `vocabulary` of at least
`TOKENIZER_MINIMUM`, `write_hugging_face(directory, tokenizer=True)` writes all that a cluster needs to serve it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 1, (2, 3)
_SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
TOKENIZER_MINIMUM = len(_SPECIAL) + 256


@dataclass(kw_only=True)
class SmallCheckpoint:
    """Random weights under Hugging Face names, and what config.json says of them.

    A kind of model fills `state` and says its `config`. No parameter is at a value at which it would not matter.
    """

    vocabulary: int = 64
    seed: int = 0
    state: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.fill()

    def fill(self) -> None:
        """Draws every tensor into `state`."""
        raise AssertionError("a kind of model draws its own tensors")

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        raise AssertionError("a kind of model has its own configuration")

    def draw(self, name: str, *shape: int, around: float = 0.0) -> None:
        """A parameter, normally distributed with a deviation of 0.15."""
        self.state[name] = self._random.normal(around, 0.15, shape).astype(np.float32)

    def write_hugging_face(self, directory: Path, shards: int = 1, tokenizer: bool = False, **settings: Any) -> Path:
        """Writes config.json, with `settings` in place of the usual ones (None removes one), and safetensors; with
        `tokenizer` also what the tokenizer library reads."""
        directory.mkdir(parents=True, exist_ok=True)
        removed = {key for key, value in settings.items() if value is None}
        config = {key: value for key, value in (self.config() | settings).items() if key not in removed}
        (directory / "config.json").write_text(json.dumps(config))
        if tokenizer:
            write_tokenizer(directory, self.vocabulary)
        if shards == 1:
            save_file(self.state, directory / "model.safetensors")
            return directory
        weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(self.state)}
        for shard in set(weight_map.values()):
            save_file({name: self.state[name] for name in weight_map if weight_map[name] == shard}, directory / shard)
        index = {"metadata": {"total_size": sum(t.nbytes for t in self.state.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory


@dataclass(kw_only=True)
class SmallModel(SmallCheckpoint):
    """A model of the family llama, qwen2, qwen3 or qwen3_moe.

    `bias`: llama: of all projections; qwen3 and qwen3_moe: of those of attention; qwen2 always has those of queries,
    keys and values. A `tied` model repeats a few tokens: an untied one generates 15 different ones in 32, with a
    vocabulary of 320. `experts`, `active`, `expert_inner`, `normalised`, `sparse_step` and `dense_layers` are of
    qwen3_moe only.
    """

    family: str = "llama"
    layers: int = 2
    hidden: int = 32
    inner: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 128
    tied: bool = False
    bias: bool = False
    experts: int = 6
    active: int = 2
    expert_inner: int = 32
    normalised: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    _HUGGING_FACE: ClassVar = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
    _GGUF: ClassVar = {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
        "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    }

    def fill(self) -> None:
        head_norm = self.family in ("qwen3", "qwen3_moe")
        qkv_bias = self.bias or self.family == "qwen2"
        output_bias = self.bias and self.family != "qwen2"
        self.draw("model.embed_tokens.weight", self.vocabulary, self.hidden)
        self.draw("model.norm.weight", self.hidden, around=1)
        if not self.tied:
            self.draw("lm_head.weight", self.vocabulary, self.hidden)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.draw(f"{name}.{norm}.weight", self.hidden, around=1)
            self._linear(f"{name}.self_attn.q_proj", q, self.hidden, qkv_bias)
            self._linear(f"{name}.self_attn.k_proj", kv, self.hidden, qkv_bias)
            self._linear(f"{name}.self_attn.v_proj", kv, self.hidden, qkv_bias)
            self._linear(f"{name}.self_attn.o_proj", self.hidden, q, output_bias)
            if head_norm:
                self.draw(f"{name}.self_attn.q_norm.weight", self.head_dim, around=1)
                self.draw(f"{name}.self_attn.k_norm.weight", self.head_dim, around=1)
            if layer not in self.sparse_layers:
                self._feed_forward(f"{name}.mlp", self.inner, self.bias and self.family == "llama")
                continue
            self.draw(f"{name}.mlp.gate.weight", self.experts, self.hidden)
            for expert in range(self.experts):
                self._feed_forward(f"{name}.mlp.experts.{expert}", self.expert_inner, False)

    @property
    def sparse_layers(self) -> list[int]:
        """Layers with experts."""
        return [
            layer
            for layer in range(self.layers if self.family == "qwen3_moe" else 0)
            if layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0
        ]

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        self.draw(f"{name}.weight", rows, columns)
        if bias:
            self.draw(f"{name}.bias", rows)

    def _feed_forward(self, name: str, inner: int, bias: bool) -> None:
        self._linear(f"{name}.gate_proj", inner, self.hidden, bias)
        self._linear(f"{name}.up_proj", inner, self.hidden, bias)
        self._linear(f"{name}.down_proj", self.hidden, inner, bias)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [self._HUGGING_FACE[self.family]],
            "model_type": self.family,
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
            "bos_token_id": BOS,
            "eos_token_id": list(EOS),
        }
        if self.family != "qwen2":
            config["attention_bias"] = self.bias
        if self.family == "llama":
            config["mlp_bias"] = self.bias
        if self.family == "qwen3_moe":
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.active,
                "moe_intermediate_size": self.expert_inner,
                "norm_topk_prob": self.normalised,
                "decoder_sparse_step": self.sparse_step,
                "mlp_only_layers": list(self.dense_layers),
            }
        return config

    def write_gguf(
        self,
        path: Path,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        architecture: str | None = None,
        extra: dict[str, np.ndarray] | None = None,
        vocabulary: list[str] | None = None,
        file_tensors: int = 0,
        **metadata: float | str,
    ) -> Path:
        """Writes GGUF as llama.cpp's converter does; matrices are stored as `kind`. `metadata`: more keys of the
        architecture, with __ for a dot; `extra`: more tensors; `architecture`: what the file claims to be;
        `file_tensors`: in several files, each of so many tensors at most. Returns the first."""
        architecture = architecture or gguf.MODEL_ARCH_NAMES[self._GGUF[self.family]]
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=file_tensors)
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
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS[0])
        if self.family == "qwen3_moe":
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.active)
            writer.add_expert_feed_forward_length(self.expert_inner)
        if vocabulary is not None:
            writer.add_token_list(vocabulary)
            writer.add_token_types([1] * len(vocabulary))
            writer.add_token_scores([0.5 * i for i in range(len(vocabulary))])
        for key, value in metadata.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            if isinstance(value, int):
                add = writer.add_uint32
            add(f"{architecture}.{key.replace('__', '.')}", value)
        names = gguf.get_tensor_name_map(self._GGUF[self.family], self.layers)
        for name, tensor in self._stacked().items():
            stored = tensor
            for projection, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads)):
                if projection in name and self.family == "llama":
                    # As in llama.cpp's convert_hf_to_gguf.py: halves become neighbours.
                    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
                    stored = split.swapaxes(1, 2).reshape(tensor.shape)
            plain = tensor.ndim == 1 or name.endswith("mlp.gate.weight")
            used = gguf.GGMLQuantizationType.F32 if plain else kind
            writer.add_tensor(
                names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quantize(stored, used), raw_dtype=used
            )
        for name, tensor in (extra or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if file_tensors else path

    def _stacked(self) -> dict[str, np.ndarray]:
        """The state with the experts of a layer as one tensor, as GGUF has them."""
        state = {name: tensor for name, tensor in self.state.items() if ".experts." not in name}
        for layer in self.sparse_layers:
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts"
                state[f"{name}.{part}.weight"] = np.stack(
                    [self.state[f"{name}.{expert}.{part}.weight"] for expert in range(self.experts)]
                )
        return state


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A byte-level tokenizer of exactly so many tokens, its end-of-sequence tokens as in `SmallModel.config`: every
    text has tokens, every token has a text."""
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = [(first, second) for first in letters for second in letters][: vocabulary - TOKENIZER_MINIMUM]
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in pairs)]
    assert len(words) == vocabulary, f"a vocabulary must have {TOKENIZER_MINIMUM} to {TOKENIZER_MINIMUM + 676} tokens"
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}assistant: "
    config = {"bos_token": _SPECIAL[BOS], "eos_token": _SPECIAL[EOS[0]], "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
