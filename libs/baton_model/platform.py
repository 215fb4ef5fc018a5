"""What a model computes on: a device, and what is made for it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .attention.base import AttentionBackend
from .attention.cpu import CpuAttention
from .errors import DeviceUnavailable
from .layers.cpu_operators import CpuOperators
from .layers.linear import Quantization
from .layers.operators import Operators

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Platform:
    """`dtypes`: those that it computes in. `quantizations`: how weights may be kept."""

    device: torch.device
    attention: AttentionBackend
    operators: Operators
    dtypes: tuple[torch.dtype, ...]
    quantizations: tuple[Quantization, ...] = ("none",)


def cpu_platform() -> Platform:
    return Platform(
        torch.device("cpu"), CpuAttention(), CpuOperators(), (torch.float32, torch.bfloat16), ("none", "int8")
    )


def cuda_platform(ordinal: int = 0) -> Platform:
    """The GPU `ordinal` of those that this process sees, which becomes its current one.

    Raises `DeviceUnavailable`, which says what is missing.
    """
    kernels = open_flashinfer()
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        built = "was built without CUDA" if torch.version.cuda is None else "finds no usable GPU or driver"
        raise DeviceUnavailable(f"there is no GPU to compute on: torch {torch.__version__} {built}", device="cuda")
    if not 0 <= ordinal < count:
        raise DeviceUnavailable(f"there is no GPU {ordinal}: this process sees {count}", device="cuda", count=count)
    device = torch.device("cuda", ordinal)
    # Streams that are made without saying for which GPU, as for capturing graphs, are this one's.
    torch.cuda.set_device(device)
    return flashinfer_platform(kernels, device, (torch.bfloat16,))


def flashinfer_platform(kernels: Any, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Platform:
    """`kernels`: the module flashinfer, or something in its place."""
    from .attention.flashinfer import FlashInferAttention
    from .layers.flashinfer_operators import FlashInferOperators

    return Platform(device, FlashInferAttention(kernels, device), FlashInferOperators(kernels), dtypes)


def open_flashinfer() -> Any:
    """The module. Raises `DeviceUnavailable`."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise DeviceUnavailable(
            f"FlashInfer can't be imported ({error}); it comes with the extra gpu", device="cuda"
        ) from error
