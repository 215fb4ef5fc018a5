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
    those sum to 1. The other layers have a feed-forward block of the model's `intermediate_size`.

    Of DeepSeek's models: `shared_size` inner neurons of experts that every token goes through (0: none); experts in
    `groups` of which `active_groups` are open to a token; `scaling` of the factors; `scoring`, see
    `layers/grouped_routers.py`.
    """

    count: int
    active: int
    intermediate_size: int
    normalised: bool
    layers: frozenset[int]
    shared_size: int = 0
    groups: int = 1
    active_groups: int = 1
    scaling: float = 1.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention. A token's cache entry is a latent of `rank` elements and a rotated key part of
    `rope`, which all heads share; a head's key has `nope` elements more that are not rotated, its value has `value`.
    Queries come from a latent of `query_rank` elements; None: from the token's vector itself."""

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int | None
    interleaved_rotary: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one model, the same whatever file they came from.

    `context_length` is the most tokens a sequence may have. `bos_token_id` and `eos_token_ids` are as the checkpoint
    states them; empty or None where it doesn't. `attention_bias` is of the query, key and value projections;
    `head_norm`: queries and keys are normalised, head by head, before they are rotated.

    With `latent`, `kv_heads` is 1 and `head_dim` the width of an entry of the cache; `mtp_layers` are the modules for
    multi-token prediction that the checkpoint declares.
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
    latent: LatentConfig | None = None
    mtp_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
