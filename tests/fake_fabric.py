"""An engine with the interface of FabricEngine, in one process, that moves bytes only when a test says so.

Engines on one `Network` reach each other. `Network.run()` lets every write happen that may; `Engine.hold` and the
`fail_…` switches keep things from happening.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from baton_fabric.engine import Access, RegisteredRegion
from baton_fabric.errors import FabricError


@dataclass(frozen=True)
class Stats:
    bytes: int = 0
    pages: int = 0
    extents: int = 0
    writes: int = 0
    first_post_ns: int = 0
    last_completion_ns: int = 0
    final_layer_ns: int = 0
    duration_us: int = 5
    overlapped_us: int = 0
    exposed_us: int = 0
    first_post_us: int = 1


@dataclass(frozen=True)
class InboxFull:
    slot: int
    generation: int
    extents: int
    first_ns: int = 1000
    full_ns: int = 3000


@dataclass(frozen=True)
class InboxViolation:
    slot: int
    generation: int
    expected: int
    extents: int


@dataclass(frozen=True)
class TransferDone:
    transfer: int
    stats: Stats


@dataclass(frozen=True)
class TransferFailed:
    transfer: int
    reason: str
    quiesced: bool
    stats: Stats = Stats()


@dataclass(frozen=True)
class TransferCancelled:
    transfer: int
    quiesced: bool = True
    stats: Stats = Stats()


@dataclass(frozen=True)
class PeerFailed:
    peer: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class EngineFailed:
    detail: str


@dataclass
class Inbox:
    endpoint: int
    generation: int
    expected: int
    arrived: int = 0


@dataclass
class Transfer:
    peer: int
    slot: int
    generation: int
    counter: int
    layers: int
    streams: list[Any]
    pages: list[tuple[int, int]]
    # (counter value, layer, first page, pages), in order.
    todo: list[tuple[int, int, int, int]] = field(default_factory=list)
    planned: int = 0
    last: bool = False
    cancelled: bool = False
    extents: int = 0


class Network:
    def __init__(self) -> None:
        self.endpoints: dict[bytes, tuple[Engine, int]] = {}
        self.memory: dict[int, mmap.mmap] = {}
        self.numbers = itertools.count(1)
        self.engines: list[Engine] = []

    def run(self) -> None:
        for engine in self.engines:
            engine.progress()


class Engine:
    def __init__(self, network: Network) -> None:
        self.network = network
        network.engines.append(self)
        self.provider = "fake"
        # Writes are neither completed nor failed, and cancels do not drain.
        self.hold = False
        # How often close_endpoint fails.
        self.fail_fences = 0
        self.unquiesced = False
        # What open_endpoint gives next, instead of an address of its own choice.
        self.addresses: list[bytes] = []
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.regions: dict[int, int] = {}
        self.device_regions: dict[int, tuple[int, int, int, bool]] = {}
        # With which domains they were to be registered.
        self.device_domains: dict[int, Any] = {}
        self.refuse_devices = False
        # Regions whose addresses are said to be in reach of late writes, and counters that nobody rings.
        self.retired: set[int] = set()
        self.polled: set[int] = set()
        self.counters: dict[int, mmap.mmap] = {}
        self.endpoints: dict[int, bytes] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.peers: dict[int, bytes] = {}
        self.transfers: dict[int, Transfer] = {}

    # --- events ---------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[Any]:
        while (event := await self.queue.get()) is not None:
            yield event

    def emit(self, event: Any) -> None:
        self.queue.put_nowait(event)

    def metrics(self) -> dict[str, int]:
        return {"bytes": 0, "busy_us": 0}

    def capabilities(self) -> list[dict[str, Any]]:
        """Of the one domain."""
        return [{"provider": "fake", "domain": "fake0", "address": "127.0.0.1"}]

    def domain_metrics(self) -> list[dict[str, int]]:
        return [{"bytes": 0, "writes": 0, "immediates": 0}]

    async def close(self) -> None:
        self.queue.put_nowait(None)

    # --- memory ---------------------------------------------------------------------------------------------------

    async def register_region(self, fd: int, length: int, domains: Any = None) -> RegisteredRegion:
        region, key = next(self.network.numbers), next(self.network.numbers) << 40
        self.network.memory[key] = mmap.mmap(fd, length)
        self.regions[region] = key
        return RegisteredRegion(region, (Access(0, key, 0),))

    async def deregister_region(self, region: int) -> None:
        if any(stream[0] == region for transfer in self.transfers.values() for stream in transfer.streams):
            raise FabricError("in use", "FAILED_PRECONDITION", "REGION_IN_USE")
        if region in self.device_regions:
            del self.device_regions[region]
            return
        self.network.memory.pop(self.regions.pop(region)).close()

    async def register_device_region(
        self, address: int, length: int, device: int, dmabuf_fd: int | None = None, domains: Any = None
    ) -> RegisteredRegion:
        """Kept in `device_regions`; no byte of it can be moved."""
        if self.refuse_devices:
            raise FabricError("no memory of GPUs", "FAILED_PRECONDITION", "DEVICE_UNSUPPORTED")
        region = next(self.network.numbers)
        self.device_regions[region] = (address, length, device, dmabuf_fd is not None)
        self.device_domains[region] = domains
        return RegisteredRegion(region, (Access(0, region << 40, address),))

    def region_retired(self, region: int) -> bool:
        return region in self.retired

    def attach_counter(self, memory_fd: int, doorbell_fd: int, rung: bool = True) -> int:
        counter = next(self.network.numbers)
        if not rung:
            self.polled.add(counter)
        self.counters[counter] = mmap.mmap(memory_fd, 8)
        return counter

    def detach_counter(self, counter: int) -> None:
        self.counters.pop(counter).close()

    # --- receiving ------------------------------------------------------------------------------------------------

    def open_endpoint(self, domains: Any = None) -> tuple[int, list[bytes]]:
        endpoint = next(self.network.numbers)
        address = self.addresses.pop(0) if self.addresses else f"fake-{endpoint}".encode()
        self.endpoints[endpoint] = address
        self.network.endpoints[address] = self, endpoint
        return endpoint, [address]

    async def close_endpoint(self, endpoint: int) -> list[tuple[int, int]]:
        if self.fail_fences:
            self.fail_fences -= 1
            raise FabricError("stalled", "DEADLINE_EXCEEDED", "ENGINE_STALLED")
        if endpoint not in self.endpoints:
            raise FabricError("unknown", "NOT_FOUND", "UNKNOWN_ENDPOINT")
        del self.network.endpoints[self.endpoints.pop(endpoint)]
        gone = {slot: inbox for slot, inbox in self.inboxes.items() if inbox.endpoint == endpoint}
        for slot in gone:
            del self.inboxes[slot]
        return [(slot, inbox.generation) for slot, inbox in gone.items() if inbox.arrived < inbox.expected]

    def open_inbox(self, endpoint: int, slot: int, generation: int, expected: int, regions: Any = None) -> None:
        assert endpoint in self.endpoints
        assert 0 <= generation < 256
        if slot in self.inboxes:
            raise FabricError("in use", "ALREADY_EXISTS", "SLOT_IN_USE")
        self.inboxes[slot] = Inbox(endpoint, generation, expected)
        if expected == 0:
            self.emit(InboxFull(slot, generation, 0))

    def close_inbox(self, slot: int, generation: int) -> bool:
        inbox = self.inboxes.get(slot)
        if inbox is None or inbox.generation != generation:
            return False
        del self.inboxes[slot]
        return inbox.arrived >= inbox.expected

    def arrive(self, slot: int, generation: int, extents: int) -> None:
        inbox = self.inboxes.get(slot)
        if inbox is None or inbox.generation != generation:
            return
        inbox.arrived += extents
        if inbox.arrived == inbox.expected:
            self.emit(InboxFull(slot, generation, inbox.arrived))
        elif inbox.arrived > inbox.expected:
            self.emit(InboxViolation(slot, generation, inbox.expected, inbox.arrived))

    # --- sending --------------------------------------------------------------------------------------------------

    def connect(self, addresses: Any, domains: Any = None) -> int:
        peer = next(self.network.numbers)
        [self.peers[peer]] = addresses
        return peer

    async def disconnect(self, peer: int) -> None:
        if self.peers.pop(peer, None) is None:
            return
        self.fail_transfers(peer, "DISCONNECTED")

    def fail_peer(self, peer: int, reason: str = "PEER_EXITED") -> None:
        self.emit(PeerFailed(peer, reason))
        self.fail_transfers(peer, reason)

    def fail_transfers(self, peer: int, reason: str) -> None:
        for number in [number for number, transfer in self.transfers.items() if transfer.peer == peer]:
            del self.transfers[number]
            self.emit(TransferFailed(number, reason, not self.unquiesced))

    def open_transfer(
        self,
        transfer: int,
        peer: int,
        slot: int,
        generation: int,
        counter: int,
        layers: int,
        streams: Any,
        source_pages: Any,
        destination_pages: Any,
    ) -> None:
        if peer not in self.peers:
            raise FabricError("unknown", "NOT_FOUND", "UNKNOWN_PEER")
        assert counter in self.counters
        pages = list(zip(source_pages, destination_pages, strict=True))
        if not pages:
            self.emit(TransferDone(transfer, Stats()))
            return
        self.transfers[transfer] = Transfer(peer, slot, generation, counter, layers, list(streams), pages)

    def submit_chunks(self, chunks: Any) -> None:
        for number, base, first, pages, last in chunks:
            transfer = self.transfers.get(number)
            if transfer is None or transfer.cancelled:
                continue
            if pages and first != transfer.planned:
                raise FabricError("order", "INVALID_ARGUMENT", "CHUNK_OUT_OF_ORDER")
            transfer.planned += pages
            transfer.last = last
            transfer.todo += [(base + layer + 1, layer, first, pages) for layer in range(transfer.layers)]

    def cancel_transfer(self, number: int) -> None:
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        transfer.cancelled = True
        if not self.hold:
            del self.transfers[number]
            self.emit(TransferCancelled(number))

    def progress(self) -> None:
        if self.hold:
            return
        for number, transfer in list(self.transfers.items()):
            if transfer.cancelled:
                del self.transfers[number]
                self.emit(TransferCancelled(number))
                continue
            self._write(number, transfer)

    def _write(self, number: int, transfer: Transfer) -> None:
        value = struct.unpack("Q", self.counters[transfer.counter][:8])[0]
        while transfer.todo and transfer.todo[0][0] <= value:
            _, layer, first, pages = transfer.todo.pop(0)
            target = self.network.endpoints.get(self.peers[transfer.peer])
            if target is None:
                self.fail_peer(transfer.peer)
                return
            for stream in transfer.streams:
                transfer.extents += self._copy(
                    stream, layer, transfer.pages[first : first + pages], transfer, target[0]
                )
        if transfer.last and not transfer.todo:
            del self.transfers[number]
            self.emit(TransferDone(number, Stats(extents=transfer.extents, writes=transfer.extents)))

    def _copy(self, stream: Any, layer: int, pages: Any, transfer: Transfer, target: Engine) -> int:
        region, layer_stride, page_stride, [(_, key, base)], length, their_layer, their_page, extents, _ = stream
        source, destination = self.network.memory[self.regions[region]], self.network.memory[key]
        for ours, theirs in pages:
            for source_offset, destination_offset, size in extents:
                start = layer * layer_stride + ours * page_stride + source_offset
                end = base + layer * their_layer + theirs * their_page + destination_offset
                assert end + size <= length
                destination[end : end + size] = source[start : start + size]
        count = len(pages) * len(extents)
        if count:
            target.arrive(transfer.slot, transfer.generation, count)
        return count
