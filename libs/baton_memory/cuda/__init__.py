"""Memory of a GPU that several processes map, and the layer counter as a GPU stores to it.

Only `open_driver` imports cuda-bindings, so that this package can be imported anywhere. Nothing of it has run on a GPU
yet but what `make gpu-check` says it has.
"""

from .counter import DeviceCounter
from .device import Device
from .driver import Driver, open_driver
from .errors import DeviceCallFailed, DeviceUnknown, DeviceUnsupported, NoGpu
from .layer_counter import CudaLayerCounter
from .memory import DeviceMemory

__all__ = [
    "CudaLayerCounter",
    "Device",
    "DeviceCallFailed",
    "DeviceCounter",
    "DeviceMemory",
    "DeviceUnknown",
    "DeviceUnsupported",
    "Driver",
    "NoGpu",
    "open_driver",
]
