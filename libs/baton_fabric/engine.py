"""The fabric engine as asyncio sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ._native import (
    Engine,
    EngineFailed,
    InboxFull,
    InboxViolation,
    PeerFailed,
    TransferCancelled,
    TransferDone,
    TransferFailed,
    TransferStats,
)
from .errors import FabricError
from .faults import FaultPlan

__all__ = [
    "Access",
    "Chunk",
    "EngineFailed",
    "Event",
    "FabricEngine",
    "FabricError",
    "InboxFull",
    "InboxViolation",
    "PeerFailed",
    "Placement",
    "RegisteredRegion",
    "RemoteAccess",
    "Stream",
    "TransferCancelled",
    "TransferDone",
    "TransferFailed",
    "TransferStats",
]


Event: TypeAlias = (
    InboxFull | InboxViolation | TransferDone | TransferFailed | TransferCancelled | PeerFailed | EngineFailed
)


class Access(NamedTuple):
    """How a region is addressed in one domain of its engine. `base`: what to add to an offset."""

    domain: int
    key: int
    base: int


class RegisteredRegion(NamedTuple):
    """`accesses`: one for each domain that the region is registered with, ascending."""

    region: int
    accesses: tuple[Access, ...]


class RemoteAccess(NamedTuple):
    """How a region is addressed through one of a peer's endpoints: `endpoint` is its place among those given to
    `FabricEngine.connect`."""

    endpoint: int
    key: int
    base: int


class Placement(NamedTuple):
    """Which layers a stream's regions hold, and in how many parts a page of each side falls.

    Parts: pages of the other side that one of this side holds; 1 on at least one side. Strides in bytes.
    """

    first_layer: int
    layers: int
    source_parts: int = 1
    source_part_stride: int = 0
    remote_parts: int = 1
    remote_part_stride: int = 0


class Stream(NamedTuple):
    """What one source region sends into one destination region. Strides, offsets and lengths in bytes.

    `remotes`: the endpoints through which the destination may be written. What is sent is spread over them, and over
    the domains that the source region is registered with, by bytes.
    Extents: (source offset, destination offset, length) within a page, or within a part of one. Without a placement:
    all layers, and pages of one size. The arithmetic: ``_native.pyi``.
    """

    source_region: int
    source_layer_stride: int
    source_page_stride: int
    remotes: Sequence[RemoteAccess]
    remote_length: int
    remote_layer_stride: int
    remote_page_stride: int
    extents: Sequence[tuple[int, int, int]]
    placement: Placement | None = None


class Chunk(NamedTuple):
    """Pages ``first_page`` to ``first_page + pages`` of a transfer, which a forward step fills.

    counter_base is step * layers: layer l is complete once the layer counter is at least counter_base + l + 1.
    """

    transfer: int
    counter_base: int
    first_page: int
    pages: int
    last: bool


class FabricEngine:
    """A fabric's domains with its native progress thread; see ``_native.Engine`` for what each method does and raises.

    Methods that are not coroutines take some ten microseconds. Belongs to the event loop that started it.
    """

    def __init__(self, native: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """Takes ownership; use `start`."""
        self._native = native
        self._loop = loop
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._closing: asyncio.Task[None] | None = None
        loop.add_reader(native.event_fd, self._take_events)

    @classmethod
    async def start(
        cls,
        provider: str = "auto",
        domains: Sequence[str] = ("127.0.0.1",),
        *,
        spin: bool = False,
        post_timeout_ms: int = 5000,
        device_memory: bool = False,
    ) -> FabricEngine:
        """Opens the domains, by address or device. Raises FabricError(PROVIDER_UNAVAILABLE, BAD_DOMAINS)."""
        native = await asyncio.to_thread(Engine, provider, list(domains), spin, post_timeout_ms, device_memory)
        return cls(native, asyncio.get_running_loop())

    @property
    def provider(self) -> str:
        return self._native.provider

    def capabilities(self) -> list[dict[str, int | bool | str]]:
        """Of each domain, by number."""
        return self._native.capabilities()

    def metrics(self) -> dict[str, int]:
        return self._native.metrics()

    def domain_metrics(self) -> list[dict[str, int]]:
        return self._native.domain_metrics()

    async def events(self) -> AsyncIterator[Event]:
        """Every event once, in order, for one consumer; ends when the engine was closed and all were taken."""
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        """Ends every transfer and the progress thread. Idempotent; takes ten seconds if the provider hangs."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.to_thread(self._native.close)
        self._loop.remove_reader(self._native.event_fd)
        self._take_events()
        self._events.put_nowait(None)

    def _take_events(self) -> None:
        for event in self._native.events():
            self._events.put_nowait(event)

    # Memory
    async def register_region(self, fd: int, length: int, domains: Sequence[int] | None = None) -> RegisteredRegion:
        return _registered(await asyncio.to_thread(self._native.register_region, fd, length, domains))

    async def register_device_region(
        self,
        address: int,
        length: int,
        device: int,
        dmabuf_fd: int | None = None,
        domains: Sequence[int] | None = None,
    ) -> RegisteredRegion:
        dmabuf = -1 if dmabuf_fd is None else dmabuf_fd
        return _registered(
            await asyncio.to_thread(self._native.register_device_region, address, length, device, dmabuf, domains)
        )

    async def deregister_region(self, region: int) -> None:
        await asyncio.to_thread(self._native.deregister_region, region)

    def region_retired(self, region: int) -> bool:
        return self._native.region_retired(region)

    def attach_counter(self, memory_fd: int, doorbell_fd: int, rung: bool = True) -> int:
        return self._native.attach_counter(memory_fd, doorbell_fd, rung)

    def detach_counter(self, counter: int) -> None:
        self._native.detach_counter(counter)

    # Receiving
    def open_endpoint(self, domains: Sequence[int] | None = None) -> tuple[int, list[bytes]]:
        return self._native.open_endpoint(domains)

    async def close_endpoint(self, endpoint: int) -> list[tuple[int, int]]:
        """The fence: afterwards no byte that was sent to the endpoint can land. (slot, generation) of the inboxes
        that were not full."""
        return await asyncio.to_thread(self._native.close_endpoint, endpoint)

    def open_inbox(
        self, endpoint: int, slot: int, generation: int, expected: int, regions: Sequence[int] | None = None
    ) -> None:
        self._native.open_inbox(endpoint, slot, generation, expected, regions)

    def close_inbox(self, slot: int, generation: int) -> bool:
        return self._native.close_inbox(slot, generation)

    # Sending
    def connect(self, addresses: Sequence[bytes], domains: Sequence[int] | None = None) -> int:
        return self._native.connect(addresses, domains)

    async def disconnect(self, peer: int) -> None:
        await asyncio.to_thread(self._native.disconnect, peer)

    def open_transfer(
        self,
        transfer: int,
        peer: int,
        slot: int,
        generation: int,
        counter: int,
        layers: int,
        streams: Sequence[Stream],
        source_pages: Sequence[int],
        destination_pages: Sequence[int],
    ) -> None:
        self._native.open_transfer(
            transfer, peer, slot, generation, counter, layers, streams, source_pages, destination_pages
        )

    def submit_chunks(self, chunks: Sequence[Chunk]) -> None:
        self._native.submit_chunks(chunks)

    def cancel_transfer(self, transfer: int) -> None:
        self._native.cancel_transfer(transfer)

    # Checksums
    def checksum(self, region: int, runs: npt.NDArray[np.uint64], unit: int, salt: int) -> int:
        """Takes long, and so belongs on another thread than the event loop's."""
        return self._native.checksum(region, runs, unit, salt)

    # For tests
    def set_faults(self, plan: FaultPlan) -> None:
        """In place of the plan before, which lets go of what it holds; one without rules costs nothing."""
        self._native.set_faults([rule.native() for rule in plan.rules], plan.seed)

    def release_faults(self) -> None:
        self._native.release_faults()


def _registered(found: tuple[int, list[tuple[int, int, int]]]) -> RegisteredRegion:
    region, accesses = found
    return RegisteredRegion(region, tuple(Access(*access) for access in accesses))
