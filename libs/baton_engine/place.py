"""Where a rank computes: what its cache lies in, what moves its layer counter, and who draws its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from baton_engine.errors import SpecInvalid
from baton_engine.messages import EngineSpec, PositionLogprobs
from baton_engine.runner import ModelRunner
from baton_engine.sampler import Draw, sample
from baton_kv.layout import PageLayout
from baton_memory import LayerCounter, SharedMemory

if TYPE_CHECKING:
    from baton_memory.cuda import DeviceMemory


class Place(ABC):
    """`memory`: what is handed to the agent; `buffer`: the same bytes as a cache takes them. `counter`: the rank's."""

    memory: SharedMemory | DeviceMemory
    buffer: Any
    counter: LayerCounter

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """What a pass calls after each layer where the device moves the counter; None where the caller has to."""
        return None

    @abstractmethod
    def prepare(self, runner: ModelRunner) -> None:
        """What is left to do with a runner that is warm, before its first step."""

    @abstractmethod
    def begin(self, value: int) -> None:
        """A step begins, at which the counter stands at `value`."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when all that the step asked for is done. Raises what went wrong with it."""

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        """See `sampler.sample`."""


class HostPlace(Place):
    """The CPU. Nothing is ever left to wait for."""

    def __init__(self, length: int) -> None:
        """Raises OSError if there is no memory."""
        self.memory = SharedMemory.create("baton-kv", length)
        self.buffer = self.memory.buffer
        self.counter = LayerCounter.create()

    def prepare(self, runner: ModelRunner) -> None:
        """Nothing."""

    def begin(self, value: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        return sample(logits, draws)


def open_place(spec: EngineSpec, layout: PageLayout) -> Place:
    """Raises OSError if there is no memory for the cache; on a GPU baton_memory.cuda's errors, `DeviceUnavailable`."""
    if spec.device == "cpu":
        return HostPlace(layout.region_bytes)
    from baton_engine.gpu_place import TorchCuda, open_gpu_place

    return open_gpu_place(layout.region_bytes, TorchCuda(gpu_of(spec)), leads=spec.rank == 0)


def gpu_of(spec: EngineSpec) -> int:
    """The GPU of a rank, as its process counts them: the one of the rank's number in the worker, or the one that the
    spec names for it. Raises SpecInvalid where it names too few."""
    number, ranks = spec.dp_rank * spec.ranks + spec.rank, spec.ranks * spec.data_parallel
    if spec.gpus and len(spec.gpus) < ranks:
        raise SpecInvalid(f"gpus names {len(spec.gpus)} GPUs; the worker has {ranks} ranks", ranks=ranks)
    return spec.gpus[number] if spec.gpus else number
