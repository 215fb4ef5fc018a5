"""Small random DeepSeek checkpoints, written without transformers; see `small_models.SmallCheckpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from small_models import BOS, EOS, SmallCheckpoint


@dataclass(kw_only=True)
class SmallDeepseek(SmallCheckpoint):
    """DeepSeek-V3, or V2 where `generation` is 2. Sizes have the names that config.json gives them less their suffixes;
    `query_rank` None: no latent of queries. `mtp`: modules for multi-token prediction, of V3 only."""

    generation: int = 3
    layers: int = 3
    hidden: int = 32
    inner: int = 48
    heads: int = 4
    rank: int = 16
    query_rank: int | None = 12
    nope: int = 8
    rope: int = 4
    value: int = 8
    experts: int = 8
    active: int = 3
    shared: int = 1
    expert_inner: int = 24
    groups: int = 2
    active_groups: int = 1
    dense_layers: int = 1
    context: int = 128
    tied: bool = False
    mtp: int = 0

    def fill(self) -> None:
        self.draw("model.embed_tokens.weight", self.vocabulary, self.hidden)
        self.draw("model.norm.weight", self.hidden, around=1)
        if not self.tied:
            self.draw("lm_head.weight", self.vocabulary, self.hidden)
        for layer in range(self.layers + self.mtp):
            self._layer(layer)
        for layer in range(self.layers, self.layers + self.mtp):
            name = f"model.layers.{layer}"
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                self.draw(f"{name}.{norm}.weight", self.hidden, around=1)
            self.draw(f"{name}.eh_proj.weight", self.hidden, 2 * self.hidden)

    def _layer(self, layer: int) -> None:
        name, key = f"model.layers.{layer}", self.nope + self.rope
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.draw(f"{name}.{norm}.weight", self.hidden, around=1)
        attention = f"{name}.self_attn"
        if self.query_rank is None:
            self.draw(f"{attention}.q_proj.weight", self.heads * key, self.hidden)
        else:
            self.draw(f"{attention}.q_a_proj.weight", self.query_rank, self.hidden)
            self.draw(f"{attention}.q_a_layernorm.weight", self.query_rank, around=1)
            self.draw(f"{attention}.q_b_proj.weight", self.heads * key, self.query_rank)
        self.draw(f"{attention}.kv_a_proj_with_mqa.weight", self.rank + self.rope, self.hidden)
        self.draw(f"{attention}.kv_a_layernorm.weight", self.rank, around=1)
        self.draw(f"{attention}.kv_b_proj.weight", self.heads * (self.nope + self.value), self.rank)
        self.draw(f"{attention}.o_proj.weight", self.hidden, self.heads * self.value)
        if layer < self.dense_layers:
            self._feed_forward(f"{name}.mlp", self.inner)
            return
        self.draw(f"{name}.mlp.gate.weight", self.experts, self.hidden)
        if self.generation == 3:
            self.draw(f"{name}.mlp.gate.e_score_correction_bias", self.experts)
        for expert in range(self.experts):
            self._feed_forward(f"{name}.mlp.experts.{expert}", self.expert_inner)
        if self.shared:
            self._feed_forward(f"{name}.mlp.shared_experts", self.shared * self.expert_inner)

    def _feed_forward(self, name: str, inner: int) -> None:
        self.draw(f"{name}.gate_proj.weight", inner, self.hidden)
        self.draw(f"{name}.up_proj.weight", inner, self.hidden)
        self.draw(f"{name}.down_proj.weight", self.hidden, inner)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [f"DeepseekV{self.generation}ForCausalLM"],
            "model_type": f"deepseek_v{self.generation}",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "moe_intermediate_size": self.expert_inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "kv_lora_rank": self.rank,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.active,
            "n_shared_experts": self.shared,
            "n_group": self.groups,
            "topk_group": self.active_groups,
            "first_k_dense_replace": self.dense_layers,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": self.tied,
            "bos_token_id": BOS,
            "eos_token_id": list(EOS),
        }
        if self.generation == 2:
            return config | {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False}
        return config | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "num_nextn_predict_layers": self.mtp,
        }

    def write_gguf(
        self,
        path: Path,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        split: bool = True,
        **metadata,
    ) -> Path:
        """Writes GGUF as llama.cpp's converter does; matrices are stored as `kind`. Not `split`: as it did before it
        took the up-projections apart. `metadata`: more keys of the architecture, with __ for a dot."""
        key, suffix = self.nope + self.rope, "_mla" if split else ""
        numbers = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": 1 if split else self.heads,
            "attention.kv_lora_rank": self.rank,
            "rope.dimension_count": self.rope,
            "leading_dense_block_count": self.dense_layers,
            "expert_count": self.experts,
            "expert_used_count": self.active,
            "expert_shared_count": self.shared,
            "expert_feed_forward_length": self.expert_inner,
            "expert_gating_func": self.generation - 1,
            "expert_group_count": self.groups,
            "expert_group_used_count": self.active_groups,
            "attention.key_length": self.rank + self.rope,
            "attention.value_length": self.rank,
            f"attention.key_length{suffix}": key,
            f"attention.value_length{suffix}": self.value,
        }
        if self.query_rank is not None:
            numbers["attention.q_lora_rank"] = self.query_rank
        values: dict[str, Any] = numbers | {
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10_000.0,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": self.generation == 3,
        }
        writer = gguf.GGUFWriter(path, "deepseek2")
        for name, value in (values | {name.replace("__", "."): value for name, value in metadata.items()}).items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](f"deepseek2.{name}", value)
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS[0])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, self.layers)
        for name, tensor in self._as_gguf(split).items():
            used = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 or name.endswith("mlp.gate.weight") else kind
            stored = gguf.quantize(np.ascontiguousarray(tensor), used)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored, raw_dtype=used)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _as_gguf(self, split: bool) -> dict[str, np.ndarray]:
        """The state with the experts of a layer as one tensor, and the up-projections in two."""
        state: dict[str, np.ndarray] = {}
        for name, tensor in self.state.items():
            if ".experts." in name:
                layer, _, rest = name.partition(".experts.")
                number, _, part = rest.partition(".")
                if number == "0":
                    each = [self.state[f"{layer}.experts.{i}.{part}"] for i in range(self.experts)]
                    state[f"{layer}.experts.{part}"] = np.stack(each)
            elif split and ".kv_b_proj." in name:
                heads = tensor.reshape(self.heads, self.nope + self.value, self.rank)
                state[name.replace("kv_b", "k_b")] = heads[:, : self.nope].swapaxes(1, 2)
                state[name.replace("kv_b", "v_b")] = heads[:, self.nope :]
            else:
                state[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
        return state
