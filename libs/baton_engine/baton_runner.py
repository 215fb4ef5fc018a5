"""A model of `baton_model` as the model process runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from baton_engine.messages import EngineSpec
from baton_engine.runner import Batch, ModelFacts, Progress
from baton_kv.layout import PageLayout
from baton_model.batch import ForwardBatch
from baton_model.cache import PagedCache, open_cache
from baton_model.fingerprint import fingerprint
from baton_model.loaders import load_model as load_weights
from baton_model.model import Model
from baton_model.parallel import SOLO, RankGroup


def load_model(spec: EngineSpec, progress: Progress, group: RankGroup = SOLO) -> BatonRunner:
    """Loads what `group.rank` needs of the checkpoint at `spec.model_path`. Raises baton_model's typed errors,
    OSError."""
    path = Path(spec.model_path)
    model = load_weights(path, spec.dtype, group=group, quantization=spec.quantization)
    progress("fingerprint", 1.0)
    return BatonRunner(model, path.name.removesuffix(".gguf"), fingerprint(path))


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

    def bind(self, memory: memoryview, layout: PageLayout) -> None:
        self._cache = open_cache(
            memory,
            self._model.cache_shape,
            order=layout.order,
            pages=layout.pages,
            page_size=layout.page_size,
            dtype=self._model.dtype,
        )

    def forward(self, batch: Batch, on_layer: Callable[[int], None]) -> torch.Tensor:
        assert self._cache is not None
        hidden = self._model.forward(
            ForwardBatch(
                torch.tensor(batch.token_ids),
                torch.tensor(batch.positions),
                batch.query_lens,
                batch.context_lens,
                batch.page_tables,
            ),
            self._cache,
            on_layer,
        )
        # Nothing to sample: nothing to multiply with the largest matrix of the model.
        return self._model.logits(hidden[batch.sampled]) if batch.sampled else hidden.new_empty((0, 0))
