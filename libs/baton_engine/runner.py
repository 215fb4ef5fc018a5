"""What the model process needs of a model. `baton_runner` is the real one; tests bring a small one of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from baton_engine.messages import EngineSpec
from baton_kv.layout import PageLayout

if TYPE_CHECKING:
    import torch

    from baton_model.parallel import RankGroup


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is, whatever runs it. `kv_heads` are the whole model's, `rank_kv_heads` this rank's.

    `order` is MLA for a model with a latent cache, of one head of `head_dim` elements a token; None for one that takes
    its keys and values in any order.
    """

    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    rank_kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    order: Literal["MLA"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over B sequences and N tokens, flattened in the order of the sequences.

    `token_ids`, `positions`: N each. `query_lens`: how many of them belong to each sequence. `context_lens`: tokens of
    each in the cache afterwards, the new ones included. `page_tables`: the pages of each, in order, enough for its
    context. `sampled`: which of the N tokens' logits are wanted.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    page_tables: Sequence[Sequence[int]]
    sampled: Sequence[int]


class ModelRunner(Protocol):
    """A loaded model with its cache."""

    @property
    def facts(self) -> ModelFacts: ...

    def bind(self, memory: Any, layout: PageLayout) -> None:
        """Takes `memory`, `layout.region_bytes` writable bytes, as its KV cache: a buffer, or on a GPU a tensor of
        uint8. Called once, before any forward."""

    def forward(self, batch: Batch, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Computes a batch: float32 logits [len(batch.sampled), vocabulary].

        Calls `on_layer(l)` for each layer in order, as soon as that layer's KV entries are in the pages.
        """


Progress: TypeAlias = Callable[[str, float], None]
# Loads what the group's rank needs of the model.
LoadModel: TypeAlias = "Callable[[EngineSpec, Progress, RankGroup], ModelRunner]"
