"""One GPU, with its primary context held, and what it can do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .driver import Driver
from .errors import DeviceUnknown, DeviceUnsupported

# Without these there is no memory that another process can map.
_NEEDED = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")


class Device:
    """Holds the primary context: the one that torch and libfabric's runtime calls use too, so that all see the same
    mappings."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """`ordinal`: as this process counts. Raises DeviceUnknown, DeviceUnsupported, DeviceCallFailed."""
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise DeviceUnknown(f"there is no GPU {ordinal}: this process sees {count}", ordinal=ordinal, count=count)
        self.driver = driver
        self.ordinal = ordinal
        self._device = driver.call("cuDeviceGet", ordinal)
        self.uuid = _uuid(driver, self._device)
        missing = [name for name in _NEEDED if not self._attribute(name)]
        if missing:
            raise DeviceUnsupported(
                f"GPU {ordinal} ({self.uuid}) can't share memory between processes: it lacks {', '.join(missing)}",
                device=self.uuid,
                missing=", ".join(missing),
            )
        # Asked for where it is not there, cuMemCreate fails.
        self.rdma = bool(self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        self.dmabuf = bool(self._attribute("DMA_BUF_SUPPORTED"))
        self._cleanup = ExitStack()
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        self._cleanup.callback(driver.call, "cuDevicePrimaryCtxRelease", self._device)

    @classmethod
    def find(cls, driver: Driver, name: str) -> Device:
        """The GPU of this uuid ("GPU-..."). Ordinals differ between processes, uuids don't.

        Raises DeviceUnknown, DeviceUnsupported, DeviceCallFailed.
        """
        seen = []
        for ordinal in range(driver.device_count()):
            seen.append(_uuid(driver, driver.call("cuDeviceGet", ordinal)))
            if seen[-1] == name:
                return cls(driver, ordinal)
        raise DeviceUnknown(f"there is no GPU {name} here, only {', '.join(seen)}", device=name)

    @property
    def pci_address(self) -> str:
        """As sysfs writes it: 0000:18:00.0."""
        domain, bus, device = (self._attribute(f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE"))
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is this thread's current one inside."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def locate(self, holder: Any) -> None:
        """Names this device in the `location` of a CUmemAllocationProp or CUmemAccessDesc."""
        holder.location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        holder.location.id = self.ordinal

    def close(self) -> None:
        """Lets go of the context; memory of the device must have been closed before. Idempotent."""
        self._cleanup.close()

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self._device))


def _uuid(driver: Driver, device: Any) -> str:
    # As nvidia-smi writes it.
    return f"GPU-{uuid.UUID(bytes=bytes(driver.call('cuDeviceGetUuid', device).bytes))}"
