"""A CUDA graph without CUDA: records what torch is asked to do, and does it again on the same memory.

As with a real graph, replaying runs no Python of the model: values that Python computed while capturing stay as they
were, results go to the tensors of the capture, and whoever reads a tensor's value while capturing is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_READS_A_VALUE = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::_unique2"}


class RecordedGraph:
    """`with graph.capture(): ...`, then `graph.replay()`."""

    capturing: RecordedGraph | None = None

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def capture(self) -> _Recorder:
        return _Recorder(self)

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()

    def add(self, call: Callable[[], Any], results: Any) -> None:
        def again() -> None:
            for old, new in zip(_tensors(results), _tensors(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.steps.append(again)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __enter__(self) -> Any:
        assert RecordedGraph.capturing is None
        RecordedGraph.capturing = self._graph
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RecordedGraph.capturing = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in _READS_A_VALUE, f"{name}: a captured graph can't wait for a value"
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self._graph.add(lambda: func(*args, **kwargs), results)
        return results


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a graph records as one piece."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = RecordedGraph.capturing
        with _disable_current_modes():
            results = function(*args, **kwargs)
        if graph is not None:
            graph.add(lambda: function(*args, **kwargs), results)
        return results

    return call


def _tensors(results: Any) -> list[torch.Tensor]:
    found = results if isinstance(results, tuple | list) else [results]
    return [result for result in found if isinstance(result, torch.Tensor)]
