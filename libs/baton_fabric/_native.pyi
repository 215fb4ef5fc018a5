"""The native core: one progress thread that owns every libfabric object of an engine.

Every method may be called from any thread; calls release the GIL, take effect on the progress thread and return once
they have. They take some ten microseconds, except where a docstring says otherwise. All raise
``baton_fabric.errors.FabricError`` (its docstring lists the reasons). Times are CLOCK_MONOTONIC of this node in
nanoseconds, durations microseconds, sizes bytes.

Extent, Stream, Chunk and Event exist for type checkers only; baton_fabric.engine has them for programs.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Extent: TypeAlias = tuple[int, int, int]
"""(source_offset, destination_offset, length) within a page."""

Placement: TypeAlias = tuple[int, int, int, int, int, int]
"""(first_layer, layers, source_parts, source_part_stride, remote_parts, remote_part_stride): see Stream."""

RemoteAccess: TypeAlias = tuple[int, int, int]
"""(endpoint, key, base): endpoint is the place among those given to connect, base what to add to an offset."""

Stream: TypeAlias = (
    tuple[int, int, int, Sequence[RemoteAccess], int, int, int, Sequence[Extent]]
    | tuple[int, int, int, Sequence[RemoteAccess], int, int, int, Sequence[Extent], Placement | None]
)
"""What one source region sends into one destination region:

(source_region, source_layer_stride, source_page_stride, remotes, remote_length, remote_layer_stride,
remote_page_stride, extents of a page). Byte b of extent e of layer l of the pair of pages (s, d) goes from
``l * source_layer_stride + s * source_page_stride + e.source_offset + b`` of the region to
``l * remote_layer_stride + d * remote_page_stride + e.destination_offset + b`` of the remote one.

With a placement the regions hold only the layers [first_layer, first_layer + layers), and l counts from first_layer.
Where pages of the two sides have different sizes, a transfer's lists number the smaller ones: on the side whose pages
consist of several parts, number n is part n % parts of page n // parts and lies at
``n // parts * page_stride + n % parts * part_stride``. Every layer of a transfer must be in one of its streams.

The extents of a batch (one layer of one chunk) go out by all domains that the source region is registered with, and
arrive by all remotes, each with an equal share of the bytes: see spread.
"""

Chunk: TypeAlias = tuple[int, int, int, int, bool]
"""(transfer, counter_base, first_page, pages, last): see Engine.submit_chunks."""

def crc32c(data: bytes, by_table: bool = False) -> int:
    """CRC-32C (Castagnoli); by the CPU's instruction where it has one."""

def spread(
    sources: int, destinations: int, extents: int, quantum: int, batch: int, salt: int
) -> list[tuple[int, int, int, int]]:
    """How a batch of so many extents is divided: (source, destination, first, end) of each lane between a domain of
    ours and one of the peer's.

    Both sides cut the batch into equal parts, one for each of their domains, and a lane is where two parts overlap; so
    there are sources + destinations - gcd(sources, destinations). The batch is divided in pieces of at least quantum
    extents, if it has so many. Each bound is within one piece of where it should be; over the batches 0, 1, 2, ... with
    one salt that evens out.
    """

def libfabric_version() -> tuple[int, int]:
    """(major, minor) of the libfabric that is loaded."""

class TransferStats:
    """What a transfer moved until its end. A time that did not happen is 0."""

    @property
    def bytes(self) -> int:
        """Bytes of all writes that were posted."""
    @property
    def pages(self) -> int:
        """Pairs of pages planned by chunks (each is sent once for every layer)."""
    @property
    def extents(self) -> int: ...
    @property
    def writes(self) -> int: ...
    @property
    def first_post_ns(self) -> int: ...
    @property
    def last_completion_ns(self) -> int: ...
    @property
    def final_layer_ns(self) -> int:
        """When this engine saw the counter pass the final layer of the last chunk (or got that plan, if later)."""
    @property
    def duration_us(self) -> int:
        """First post to last completion."""
    @property
    def overlapped_us(self) -> int:
        """The part of duration_us before final_layer_ns."""
    @property
    def exposed_us(self) -> int:
        """final_layer_ns to last completion."""
    @property
    def first_post_us(self) -> int:
        """From seeing the counter pass the first layer (or from the plan, if it came later) to the first post."""

class InboxFull:
    """Every expected extent has arrived; the bytes are in place. Once for each inbox at most."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def extents(self) -> int: ...
    @property
    def first_ns(self) -> int:
        """When the first immediate was seen; equal to full_ns where nothing was expected."""
    @property
    def full_ns(self) -> int: ...

class InboxViolation:
    """More extents arrived than were expected. Once for each inbox at most, and perhaps after InboxFull."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def extents(self) -> int:
        """How many had arrived when it was noticed."""

class TransferDone:
    """Every write is complete and delivered. Terminal."""

    @property
    def transfer(self) -> int: ...
    @property
    def stats(self) -> TransferStats: ...

class TransferFailed:
    """The transfer's peer failed or was disconnected, or the engine failed or was closed. Terminal.

    Nothing reads local memory for this transfer any more (over local: nothing that is read from now on will count as
    arrived). ``quiesced``: also proven that none of its writes can
    still touch remote memory.
    """

    @property
    def transfer(self) -> int: ...
    @property
    def reason(self) -> str:
        """WRITE_FAILED, POST_TIMEOUT (nothing was accepted), WRITE_TIMEOUT (nothing was completed), PEER_EXITED (or,
        over local, closed its endpoint), DISCONNECTED, ENGINE_CLOSED or ENGINE_FAILED."""
    @property
    def quiesced(self) -> bool: ...
    @property
    def stats(self) -> TransferStats: ...

class TransferCancelled:
    """The transfer was cancelled, and every write that it had posted is complete and delivered. Terminal."""

    @property
    def transfer(self) -> int: ...
    @property
    def quiesced(self) -> bool:
        """Always true; a transfer that cannot be drained ends as TransferFailed."""
    @property
    def stats(self) -> TransferStats: ...

class PeerFailed:
    """The sending endpoint of the peer is closed. TransferFailed follows for each transfer that it had.

    The peer's id is of no further use but for disconnect; connect again for a new one.
    """

    @property
    def peer(self) -> int: ...
    @property
    def reason(self) -> str:
        """As TransferFailed.reason."""
    @property
    def detail(self) -> str:
        """For logs: the provider's words."""

class EngineFailed:
    """The progress thread ended by an error: the engine is of no further use. Every transfer has failed before this."""

    @property
    def detail(self) -> str: ...

Event: TypeAlias = (
    InboxFull | InboxViolation | TransferDone | TransferFailed | TransferCancelled | PeerFailed | EngineFailed
)

class Engine:
    """A fabric, its one progress thread, and everything that lives on them."""

    def __init__(
        self,
        provider: str = "auto",
        domains: Sequence[str] = ["127.0.0.1"],
        spin: bool = False,
        post_timeout_ms: int = 5000,
        device_memory: bool = False,
    ) -> None:
        """Opens the domains and starts the progress thread. Takes milliseconds.

        provider: "auto" (over local to peers that it can reach, over tcp to others), "tcp" (the best RDM provider over
        tcp that libfabric has: tcp, net or tcp;ofi_rxm), "local" (without libfabric, between processes of one user and
        network namespace: the receiver's thread maps the sender's memory and copies), "shm" (libfabric's own for one
        host), or any provider name of libfabric; the rxm of libfabric 1.11 to 1.17 can crash the process if an endpoint
        is closed within a message, so prefer newer ones. domains: for each the local address to bind to, or the name of
        the device (as capabilities()[n]["domain"] has it); efa goes by devices only, local and shm by nothing. They are
        numbered from 0 and must be alike.
        spin: the thread never blocks; for a core of its own. post_timeout_ms: a peer that accepts and completes nothing
        for this long while there is work for it has failed; one write that is older than four times this fails its peer
        too. device_memory: of the names that provider stands for, prefer one that can register memory of GPUs.
        """
    @property
    def provider(self) -> str:
        """Name of the provider in use, as libfabric gives it; with "+local" where auto has both."""
    def capabilities(self) -> list[dict[str, int | bool | str]]:
        """What fi_getinfo said of each domain; of local, the same in its terms.

        provider, fabric, domain, address (that it is bound to; empty unless IP): str; cq_data_size, mr_mode,
        mr_key_size, max_msg_size, inject_size, tx_size, window (writes in flight on a lane at most): int; mr_local,
        mr_virt_addr, mr_prov_key, mr_allocated, wait_fd (the thread can block until something completes), ordered
        (writes to a peer land in the order of posting), device_memory (of GPUs may be registered, if this libfabric was
        built for it), dmabuf (as dma-bufs too): bool.
        """
    @property
    def event_fd(self) -> int:
        """Readable while events() has something to return. Owned by the engine."""
    def events(self) -> list[Event]:
        """Takes all events so far, oldest first. Never blocks."""
    def close(self) -> None:
        """Closes every endpoint, region and the fabric and ends the thread. Idempotent.

        Every transfer still open ends as TransferFailed("ENGINE_CLOSED"); events() and metrics() work afterwards,
        anything else raises ENGINE_CLOSED. If the provider does not return, gives up after a few seconds.
        """
    def metrics(self) -> dict[str, int]:
        """Counters since the start and some levels. Does not wait for the progress thread.

        Counters: bytes, writes, extents, completions, delivery_completions, write_errors, eagain, transfers_done,
        transfers_failed, transfers_cancelled, peers_failed, immediates, extents_received, stale_immediates (for no
        open inbox, or another generation of it), violations, inboxes_full, late_chunks (for a transfer that had ended),
        receive_errors, wakeups, faults (that a test had made). Levels: transfers, inboxes, regions, retired_regions
        (deregistered, but their addresses are kept until endpoints close), peers, endpoints, counters,
        writes_in_flight, bytes_in_flight. busy_us: how long the thread has been in its present turn, 0 if it waits:
        large means that the provider does not return.
        """
    def domain_metrics(self) -> list[dict[str, int]]:
        """Of each domain, since the start: bytes and writes posted, immediates that arrived."""

    # Memory
    def register_region(
        self, fd: int, length: int, domains: Sequence[int] | None = None
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Maps the file's first ``length`` bytes, every page of them, and registers them with these domains, or all ->
        (region, (domain, key, base) of each). fd is duplicated.

        Takes some 0.2 s a GB, in which the engine goes on serving transfers (over verbs it does not). base is what to
        add to an offset to address the region remotely: 0 where the provider addresses by offset. Where there is less
        memory than the file promises it is refused with NO_MEMORY, and nothing stays registered.
        """
    def register_device_region(
        self, address: int, length: int, device: int, dmabuf_fd: int = -1, domains: Sequence[int] | None = None
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Registers memory of CUDA device ``device`` that this process has mapped at ``address``, as register_region.

        dmabuf_fd: a dma-buf of the same bytes, used where the provider takes it; duplicated. Refused with
        DEVICE_UNSUPPORTED without the capability device_memory, with FABRIC_CALL_FAILED where libfabric was
        built without CUDA. The addresses stay the caller's, who keeps them mapped until the region is deregistered,
        and reserved until region_retired is false.
        """
    def deregister_region(self, region: int) -> None:
        """Refused with REGION_IN_USE while a transfer reads it or an inbox may be written through it.

        A write that was never quiesced cannot hurt any more: it is refused by the fabric or lands in memory that
        nobody sees.
        """
    def region_retired(self, region: int) -> bool:
        """Whether the region was deregistered, but an endpoint is open still over which its addresses may be written.

        False for a region that there never was.
        """
    def attach_counter(self, memory_fd: int, doorbell_fd: int, rung: bool = True) -> int:
        """memory_fd: the 64-bit counter is at offset 0, native byte order; doorbell_fd: an eventfd. Both duplicated.

        rung: the doorbell rings whenever the counter has moved. Without it, as with a GPU that stores, the thread spins
        while a submitted chunk waits for the counter.
        """
    def detach_counter(self, counter: int) -> None:
        """Refused with COUNTER_IN_USE while a transfer that has not ended uses it."""

    # Receiving
    def open_endpoint(self, domains: Sequence[int] | None = None) -> tuple[int, list[bytes]]:
        """A receiving endpoint for one peer, in each of these domains or of all -> (endpoint, fabric addresses for that
        peer's connect, ascending by domain)."""
    def close_endpoint(self, endpoint: int) -> list[tuple[int, int]]:
        """The fence: once this returns no byte can land any more that was sent to this endpoint, in whatever domain. If
        it raises, try again: what could be closed is closed.

        Its inboxes are gone with it; returned are (slot, generation) of those that were not full. Takes up to some
        ten milliseconds, by provider.
        """
    def open_inbox(
        self, endpoint: int, slot: int, generation: int, expected: int, regions: Sequence[int] | None = None
    ) -> None:
        """Counts the extents of one transfer. slot: 0..4095; generation: of the slot, its low 8 bits travel; expected:
        0 is full at once.

        regions: those that the transfer writes into, None for all that there are now; they cannot be deregistered
        until the inbox is full or closed. Where the provider cannot wake us (wait_fd false) an endpoint makes progress
        only while it has an inbox that is open and not full, and for one post timeout after close_inbox: so leave the
        inbox open until the sender has confirmed quiescence.
        """
    def close_inbox(self, slot: int, generation: int) -> bool:
        """Forgets the inbox -> whether it was full. False too if there is none. Not a fence."""

    # Sending
    def connect(self, addresses: Sequence[bytes], domains: Sequence[int] | None = None) -> int:
        """Sending endpoints of its own for the peer behind the addresses of one open_endpoint -> peer. Nothing is sent
        yet.

        There is one for each lane between our domains (these, or all) and the addresses, as spread has them. A transfer
        that needs another lane opens it. If one lane fails, the peer has failed.

        BAD_ADDRESS also for a shm address of this process: closing such endpoints would crash it.
        """
    def disconnect(self, peer: int) -> None:
        """Closes the sending endpoint. Its transfers end as TransferFailed("DISCONNECTED").

        Ids that are not known any more are ignored.
        """
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
        """Fixes which pages go where. transfer: an id of the caller's choice (64 bits), not in use.

        Everything is checked here: nothing outside the regions described is ever posted. Without pages or without
        streams the transfer is done at once. Exactly one terminal event follows.
        """
    def submit_chunks(self, chunks: Sequence[Chunk]) -> None:
        """The chunk plans of a forward step, in one call; its cost does not depend on the number of layers.

        Layer l of a chunk is sent when the transfer's counter is at least counter_base + l + 1 (counter_base is
        step * layers); a plan may come before, during or after its step. first_page counts in the transfer's lists
        and must be where the chunk before ended (anything if pages is 0). last: no further chunk follows; all pages
        must be planned by then. Either all chunks of a call are taken or none; chunks for a transfer that has ended
        or is being cancelled are ignored.
        """
    def cancel_transfer(self, transfer: int) -> None:
        """No layer is begun any more, and one that has begun ends with one more write, which proves that all of it is
        delivered. TransferCancelled follows once every posted write is complete and delivered,
        or another terminal event if that comes first. Ids that are not known any more are ignored."""
    def checksum(self, region: int, runs: npt.NDArray[np.uint64], unit: int, salt: int) -> int:
        """Of runs of a region: (offset, place, length) in each row, lengths in whole units of bytes.

        The sum, modulo 2^64, over all units of a mixture of the unit's CRC-32C, its place and the salt: independent of
        how units are put together in runs, and of the order of both. On the calling thread: 10 GB/s or so. The region
        stays mapped meanwhile, also if it is deregistered or the engine closed. Raises OUT_OF_BOUNDS, UNKNOWN_REGION,
        CHECKSUM_UNSUPPORTED.
        """
    def set_faults(self, rules: Sequence[tuple[int, int, int, int, int, int, int, float, int]], seed: int = 0) -> None:
        """For tests: (at, action, peer, transfer, domain, nth, times, probability, amount) of each rule;
        baton_fabric.faults makes them. What the rules before hold is let go."""
    def release_faults(self) -> None:
        """What is held for a test goes on its way."""
