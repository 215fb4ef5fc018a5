"""Decodes of a model in CUDA graphs, one for each of a few batch sizes: a step costs one launch, and no Python a layer.

Whatever changes from step to step lies in tensors that the graphs read: token ids, positions, page numbers. A batch
runs in the smallest graph that holds it, filled up as `paged_plan.padded` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from .attention.flashinfer import DecodeSlots, FlashInferAttention, FlashInferLatentStep, FlashInferStep
from .attention.paged_plan import padded
from .batch import ForwardBatch
from .cache import PagedCache
from .model import Model

Step: TypeAlias = FlashInferStep | FlashInferLatentStep


class Graph(Protocol):
    """What `torch.cuda.CUDAGraph` does."""

    def capture(self) -> AbstractContextManager[object]:
        """What torch is asked to do inside is recorded, not done."""

    def replay(self) -> None: ...


class TorchGraph:
    """A CUDA graph whose memory comes from the pool of `torch.cuda.graph_pool_handle`: graphs that never run at once
    may share one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> AbstractContextManager[object]:
        return torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local")

    def replay(self) -> None:
        self._graph.replay()


def torch_graphs() -> Callable[[], Graph]:
    """Makes CUDA graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: TorchGraph(pool)


def graph_sizes(max_batch: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: powers of two below `max_batch`, and itself, so that less than half is padding."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(sizes[-1] * 2, max_batch))
    return tuple(sizes)


class DecodeGraphs:
    """Captured for one model and one cache. `on_layer` is captured too: what it queues is done at every replay."""

    def __init__(
        self,
        model: Model,
        backend: FlashInferAttention,
        cache: PagedCache,
        sizes: Sequence[int],
        make_graph: Callable[[], Graph],
        on_layer: Callable[[int], None],
    ) -> None:
        """Captures at once; nothing may be in the cache yet, for page 0 is written to."""
        self._backend, self._cache = backend, cache
        self._pages_each = -(-model.config.context_length // cache.page_size)
        self._token_ids = torch.zeros(max(sizes), dtype=torch.int64, device=backend.device)
        self._positions = torch.zeros(max(sizes), dtype=torch.int64, device=backend.device)
        self._captured: dict[int, tuple[Step, Graph, torch.Tensor]] = {}
        # The largest first: the smaller ones then fit into its memory.
        for size in sorted(sizes, reverse=True):
            self._captured[size] = self._capture(model, size, make_graph(), on_layer)

    @property
    def largest(self) -> int:
        return max(self._captured)

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for it: decodes only, and not too many."""
        return len(batch.query_lens) <= self.largest and all(length == 1 for length in batch.query_lens)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """As `Model.forward` for a batch that `holds` says yes to, its tensors on the CPU.

        The result is good until the next call. Raises `InvalidBatch` where pages are missing or out of range; all else
        is the caller's to check.
        """
        count = len(batch.query_lens)
        size = min(size for size in self._captured if size >= count)
        step, graph, hidden = self._captured[size]
        self._load(step, padded(batch, size))
        graph.replay()
        return hidden[:count]

    def _capture(
        self, model: Model, size: int, graph: Graph, on_layer: Callable[[int], None]
    ) -> tuple[Step, Graph, torch.Tensor]:
        step = self._backend.decode_step(self._cache, size, size * self._pages_each)
        slots = DecodeSlots(self._token_ids[:size], self._positions[:size], [1] * size, [1] * size, [[0]] * size, step)
        self._load(step, ForwardBatch.build([([0], 0)] * size, [[0]] * size))
        # Kernels are compiled and loaded by the first pass; neither can be captured.
        model.forward(slots, self._cache)
        with graph.capture():
            hidden = model.forward(slots, self._cache, on_layer)
        return step, graph, hidden

    def _load(self, step: Step, batch: ForwardBatch) -> None:
        plan = self._backend.plan_pages(batch, self._cache)
        count = len(batch.query_lens)
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        step.reload(plan)
