"""The host in the place of a GPU, for whatever is above the driver, torch's CUDA and FlashInfer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

import fake_flashinfer
from baton_engine.gpu_place import GpuPlace, open_gpu_place
from baton_engine.gpu_runner import GpuRunner
from baton_memory.cuda import DeviceMemory, open_driver
from baton_model.decode_graphs import Graph
from baton_model.loaders import load_model
from baton_model.platform import Platform, flashinfer_platform
from fake_gpu import HostGpu
from recorded_graph import RecordedGraph


class StreamGpu(HostGpu):
    """Its driver's stores are captured by the graph that torch's work is captured by. `stored`: all that were done."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[int] = []

    def _do(self, work: Callable[[], object]) -> None:
        if RecordedGraph.capturing is not None:
            RecordedGraph.capturing.add(lambda: (work(), None)[1], None)
        else:
            super()._do(work)

    def launched(self, values: tuple[int, ...]) -> None:
        cell = values[0]
        super().launched(values)
        self._do(lambda: self.stored.append(ctypes.c_uint64.from_address(cell).value))


class HostTorch:
    """See `gpu_place.DeviceTorch`."""

    ordinal = 0

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * memory.length).from_address(memory.address), dtype=torch.uint8)

    def stream(self) -> int:
        return 1

    def synchronize(self) -> None:
        assert RecordedGraph.capturing is None, "a captured graph can't wait"

    def make_graphs(self) -> Callable[[], Graph]:
        return RecordedGraph


def host_platform() -> Platform:
    return flashinfer_platform(fake_flashinfer, torch.device("cpu"), (torch.float32,))


def gpu_runner(checkpoint: Path, graph_batch: int) -> GpuRunner:
    platform = host_platform()
    return GpuRunner(
        load_model(checkpoint, "float32", platform), "small", "identity", platform.attention, graph_batch=graph_batch
    )


@contextmanager
def gpu_place(length: int, gpu: HostGpu, *, leads: bool = True) -> Iterator[GpuPlace]:
    """Its memory is unmapped at the end, whoever still has a tensor over it."""
    place = open_gpu_place(length, HostTorch(), leads=leads, driver=open_driver(gpu), kernels=fake_flashinfer)
    with closing(place.memory):
        yield place
