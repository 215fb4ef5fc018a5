"""The facts about a model that everything else is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which angle each pair of dimensions turns by at each position.

    `kind` says how the frequencies `theta ** (-2i / head_dim)` are stretched for contexts longer than the pretrained
    one; `layers/rotary.py` holds the formulas and names the fields that each kind reads. `frequency_divisors`, one for
    each pair of dimensions, is how GGUF stores the llama3 scaling: already evaluated.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routed experts: `count` in each of `layers`, of which a token goes through `active`. `normalised`: the factors of
    those sum to 1. The other layers have a feed-forward block of the model's `intermediate_size`."""

    count: int
    active: int
    intermediate_size: int
    normalised: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one model, the same whatever file they came from.

    `context_length` is the most tokens a sequence may have. `bos_token_id` and `eos_token_ids` are as the checkpoint
    states them; empty or None where it doesn't. `attention_bias` is of the query, key and value
    projections; `head_norm`: queries and keys are normalised, head by head, before they are rotated.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
