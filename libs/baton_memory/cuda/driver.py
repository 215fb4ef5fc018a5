"""The edge to the CUDA driver: where it is loaded, and where its results become values or errors."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import DeviceCallFailed, NoGpu

BINDINGS = "cuda.bindings.driver"


class Driver:
    """The driver API of cuda-bindings. `api`: its types and constants."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns besides its result code: nothing (None), one value, or a tuple.

        Raises DeviceCallFailed.
        """
        try:
            result, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:
            # So cuda-bindings says that the installed driver is older than the function.
            raise DeviceCallFailed(name, str(error)) from error
        if result != self.api.CUresult.CUDA_SUCCESS:
            raise DeviceCallFailed(
                name, result.name, out_of_memory=result == self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            )
        if len(values) < 2:
            return values[0] if values else None
        return tuple(values)

    def device_count(self) -> int:
        """GPUs that this process sees (CUDA_VISIBLE_DEVICES counts)."""
        return int(self.call("cuDeviceGetCount"))


def open_driver(api: Any = None) -> Driver:
    """Loads and initialises the driver. Makes no context. Raises NoGpu, which says what is missing.

    `api`: something in the place of cuda-bindings.
    """
    if api is None:
        try:
            api = importlib.import_module(BINDINGS)
        except ImportError as error:
            raise NoGpu(
                f"the CUDA bindings can't be imported ({error}); the extras gpu and agent-gpu have them"
            ) from error
    try:
        driver = Driver(api)
        driver.call("cuInit", 0)
        count = driver.device_count()
    except DeviceCallFailed as error:
        raise NoGpu(f"no usable CUDA driver: {error}", **error.fields) from error
    if count == 0:
        raise NoGpu("the CUDA driver sees no GPU")
    return driver
