"""A GPU: the cache in memory that the agent can map, the counter moved by stores in the stream, passes queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from baton_engine.gpu_runner import GpuRunner
from baton_engine.gpu_sampler import GpuSampler
from baton_engine.messages import PositionLogprobs
from baton_engine.place import Place
from baton_engine.runner import ModelRunner
from baton_engine.sampler import Draw
from baton_memory.cuda import CudaLayerCounter, Device, DeviceMemory, Driver, open_driver
from baton_model.decode_graphs import Graph, torch_graphs
from baton_model.platform import open_flashinfer


class DeviceTorch(Protocol):
    """What is asked of torch about one GPU."""

    ordinal: int

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        """The memory as uint8, without a copy."""

    def stream(self) -> int:
        """The driver's handle of the stream that torch queues to now: another one while a graph is captured."""

    def synchronize(self) -> None:
        """Returns when the stream is empty. Raises what went wrong in it."""

    def make_graphs(self) -> Callable[[], Graph]: ...


class TorchCuda:
    """See `DeviceTorch`."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._device = torch.device("cuda", ordinal)

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        return torch.as_tensor(memory, device=self._device)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def make_graphs(self) -> Callable[[], Graph]:
        return torch_graphs()


class GpuPlace(Place):
    """See `Place`."""

    def __init__(self, device: Device, length: int, through: DeviceTorch, kernels: Any, *, leads: bool) -> None:
        """`leads`: this rank's counter moves; the other ranks' stand still.

        Raises DeviceCallFailed (RESOURCE_EXHAUSTED if the device has no memory left), OSError.
        """
        self._torch = through
        self._leads = leads
        self._sampler = GpuSampler(kernels)
        self.memory = DeviceMemory.create(device, length)
        self.buffer = through.tensor(self.memory)
        # As memory of the host is: no earlier owner's bytes ever leave in a page.
        self.buffer.zero_()
        self._moved = CudaLayerCounter(device)
        self.counter = self._moved.counter

    @property
    def on_layer(self) -> Callable[[int], None]:
        return self._store

    def prepare(self, runner: ModelRunner) -> None:
        """Captures decodes, with the counter's stores in them."""
        if isinstance(runner, GpuRunner):
            runner.capture(self._torch.make_graphs(), self._store)
        self._torch.synchronize()

    def begin(self, value: int) -> None:
        # Of a step that failed halfway something may still be queued, and would be counted from here.
        self._torch.synchronize()
        if self._leads:
            self._moved.begin(self._torch.stream(), value)

    def finish(self) -> None:
        self._torch.synchronize()

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        return self._sampler(logits, draws)

    def _store(self, layer: int) -> None:
        if self._leads:
            self._moved.store(self._torch.stream(), layer + 1)


def open_gpu_place(
    length: int, through: DeviceTorch, *, leads: bool = True, driver: Driver | None = None, kernels: Any = None
) -> GpuPlace:
    """`driver` and `kernels`: what is used in the place of the CUDA driver and of FlashInfer."""
    device = Device(driver or open_driver(), through.ordinal)
    return GpuPlace(device, length, through, kernels or open_flashinfer(), leads=leads)
