"""The layer counter as a GPU stores to it: its page, pinned and mapped into the device's addresses."""

from __future__ import annotations

from contextlib import ExitStack

from ..counter import LayerCounter
from .device import Device


class DeviceCounter:
    """`address`: device pointer to the 64-bit cell, for a store in a stream or a captured graph.

    The store must be ordered behind the kernels that write the layer (cuStreamWriteValue64 with its default flags is).
    Nothing rings the doorbell then: whoever waits for the counter reads it in a loop. Close this before `counter`.
    """

    def __init__(self, device: Device, counter: LayerCounter) -> None:
        """Pins the counter's page. Raises DeviceCallFailed."""
        self._device = device
        self._page = counter.address
        driver, api = device.driver, device.driver.api
        flags = api.CU_MEMHOSTREGISTER_PORTABLE | api.CU_MEMHOSTREGISTER_DEVICEMAP
        with ExitStack() as cleanup:
            with device.current():
                driver.call("cuMemHostRegister", self._page, counter.memory_length, flags)
                cleanup.callback(self._unregister)
                self.address = int(driver.call("cuMemHostGetDevicePointer", self._page, 0))
            self._cleanup = cleanup.pop_all()

    def close(self) -> None:
        """Idempotent. Raises DeviceCallFailed."""
        self._cleanup.close()

    def _unregister(self) -> None:
        with self._device.current():
            self._device.driver.call("cuMemHostUnregister", self._page)
