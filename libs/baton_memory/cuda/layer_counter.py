"""A layer counter that a GPU moves, in the order of a stream, whether its work is launched or replayed from a graph.

A captured store has to say `step * layers + l + 1`, and the step is another at each replay. So the number comes in two
parts: where the step began, in eight bytes of the device's memory that are set before each step, and `l + 1`, which is
an argument of the store. A kernel of one thread adds them: a store that the driver has for streams
(cuStreamWriteValue64) is captured with its value, and setting that anew for every layer of a graph takes a call each.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

from ..counter import LayerCounter
from .counter import DeviceCounter
from .device import Device

# Assembled by the driver for whatever GPU there is. The fence is for the agent, and for network cards that read the
# memory of the GPU: whoever sees the counter sees what the stream's earlier kernels wrote.
_KERNEL = b"baton_store_layer"
STORE_LAYER_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry baton_store_layer(.param .u64 cell, .param .u64 base, .param .u64 layers)
{
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [cell];
    ld.param.u64 %rd2, [base];
    ld.param.u64 %rd3, [layers];
    cvta.to.global.u64 %rd2, %rd2;
    ld.relaxed.gpu.global.u64 %rd4, [%rd2];
    add.u64 %rd5, %rd4, %rd3;
    fence.sc.sys;
    st.relaxed.sys.u64 [%rd1], %rd5;
    ret;
}
\x00"""
_ARGUMENTS = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


class CudaLayerCounter:
    """`counter` is what is handed over, and what the host reads. Streams are handles of the driver, as integers."""

    def __init__(self, device: Device) -> None:
        """Raises OSError, DeviceCallFailed."""
        self._device = device
        driver = device.driver
        with ExitStack() as cleanup:
            self.counter = LayerCounter.create()
            cleanup.callback(self.counter.close)
            on_device = DeviceCounter(device, self.counter)
            cleanup.callback(on_device.close)
            self._cell = on_device.address
            with device.current():
                module = driver.call("cuModuleLoadData", STORE_LAYER_PTX)
                cleanup.callback(self._call, "cuModuleUnload", module)
                self._kernel = driver.call("cuModuleGetFunction", module, _KERNEL)
                base = driver.call("cuMemAlloc", 8)
                cleanup.callback(self._call, "cuMemFree", base)
            self._base = int(base)
            self._cleanup = cleanup.pop_all()

    def begin(self, stream: int, value: int) -> None:
        """Layers are counted from `value` on, in what is queued to the stream after this. Raises DeviceCallFailed."""
        self._call("cuStreamWriteValue64", stream, self._base, value, 0)

    def store(self, stream: int, layers: int) -> None:
        """The counter stands `layers` above the last `begin` once all that was queued before is done.

        May be captured in a graph. Raises DeviceCallFailed.
        """
        arguments = ((self._cell, self._base, layers), _ARGUMENTS)
        self._call("cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)

    def close(self) -> None:
        """Nothing on the device may store any more. Idempotent. Raises DeviceCallFailed."""
        self._cleanup.close()

    def _call(self, name: str, *arguments: object) -> None:
        with self._device.current():
            self._device.driver.call(name, *arguments)
