"""A model of `baton_model` on a GPU: batches go there, and decodes run in CUDA graphs once they are captured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.baton_runner import BatonRunner
from baton_engine.runner import Batch
from baton_model.attention.base import AttentionBackend
from baton_model.attention.flashinfer import FlashInferAttention
from baton_model.decode_graphs import DecodeGraphs, Graph, graph_sizes
from baton_model.model import Model


class GpuRunner(BatonRunner):
    """`graph_batch`: decodes that go together in a graph at most; 0 for none."""

    def __init__(self, model: Model, name: str, identity: str, backend: AttentionBackend, *, graph_batch: int) -> None:
        """`backend`: the model's."""
        super().__init__(model, name, identity)
        assert isinstance(backend, FlashInferAttention)
        self._backend = backend
        self._graph_batch = graph_batch
        self._graphs: DecodeGraphs | None = None

    def capture(self, make_graph: Callable[[], Graph], on_layer: Callable[[int], None]) -> None:
        """Captures decodes, `on_layer` with them, unless none are wanted. Writes to page 0."""
        if self._graph_batch:
            self._graphs = DecodeGraphs(
                self._model, self._backend, self._bound, graph_sizes(self._graph_batch), make_graph, on_layer
            )

    def forward(self, batch: Batch, on_layer: Callable[[int], None]) -> torch.Tensor:
        """See `ModelRunner.forward`; what a graph holds calls nothing, but does what was captured."""
        cache, inputs = self._bound, self._inputs(batch)
        self._model.check(inputs, cache, type(cache))
        if self._graphs is not None and self._graphs.holds(inputs):
            hidden = self._graphs.run(inputs)
        else:
            hidden = self._model.forward(inputs.on(self._model.device), cache, on_layer)
        return self._sampled(hidden, batch)
