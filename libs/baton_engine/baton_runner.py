"""A model of `baton_model` as the model process runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton_engine.messages import EngineSpec
from baton_engine.place import gpu_of
from baton_engine.runner import Batch, ModelFacts, Progress
from baton_kv.layout import PageLayout
from baton_model.batch import ForwardBatch
from baton_model.cache import PagedCache, open_cache
from baton_model.fingerprint import fingerprint
from baton_model.loaders import load_model as load_weights
from baton_model.model import Model
from baton_model.parallel import SOLO, RankGroup
from baton_model.platform import cpu_platform, cuda_platform


def load_model(spec: EngineSpec, progress: Progress, group: RankGroup = SOLO) -> BatonRunner:
    """Loads what `group.rank` needs of the checkpoint at `spec.model_path`. Raises baton_model's typed errors,
    OSError."""
    path = Path(spec.model_path)
    platform = cpu_platform() if spec.device == "cpu" else cuda_platform(gpu_of(spec))
    model = load_weights(path, spec.dtype, platform, group=group, quantization=spec.quantization)
    progress("fingerprint", 1.0)
    name, identity = path.name.removesuffix(".gguf"), fingerprint(path)
    if spec.device == "cpu":
        return BatonRunner(model, name, identity)
    from baton_engine.gpu_runner import GpuRunner

    return GpuRunner(model, name, identity, platform.attention, graph_batch=spec.max_batch if spec.graphs else 0)


class BatonRunner:
    """See `runner.ModelRunner`."""

    def __init__(self, model: Model, name: str, identity: str) -> None:
        config, shape = model.config, model.cache_shape
        self.facts = ModelFacts(
            model=name,
            fingerprint=identity,
            layers=shape.layers,
            kv_heads=config.kv_heads,
            rank_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            max_model_len=config.context_length,
            order="MLA" if shape.latent else None,
        )
        self._model = model
        self._cache: PagedCache | None = None

    def bind(self, memory: Any, layout: PageLayout) -> None:
        self._cache = open_cache(
            memory,
            self._model.cache_shape,
            order=layout.order,
            pages=layout.pages,
            page_size=layout.page_size,
            dtype=self._model.dtype,
        )

    def forward(self, batch: Batch, on_layer: Callable[[int], None]) -> torch.Tensor:
        return self._sampled(self._model.forward(self._inputs(batch), self._bound, on_layer), batch)

    @property
    def _bound(self) -> PagedCache:
        assert self._cache is not None
        return self._cache

    def _inputs(self, batch: Batch) -> ForwardBatch:
        """On the CPU."""
        return ForwardBatch(
            torch.tensor(batch.token_ids),
            torch.tensor(batch.positions),
            batch.query_lens,
            batch.context_lens,
            batch.page_tables,
        )

    def _sampled(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The logits that are wanted. Nothing to sample: nothing to multiply with the largest matrix of the model."""
        return self._model.logits(hidden[batch.sampled]) if batch.sampled else hidden.new_empty((0, 0))
