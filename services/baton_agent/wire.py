"""Between the messages of the protocol and checked values. Pure; every refusal is a typed error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.v1 import agent_pb2, common_pb2

from baton_fabric.engine import RemoteAccess
from baton_kv.immediate import SLOTS
from baton_kv.layout import PageLayout
from baton_kv.regions import LayerRun, RegionMap, RegionsMismatch
from baton_kv.shards import ShardMap
from baton_kv.streams import number_pages
from baton_rpc.addresses import TcpAddress, parse_address
from baton_rpc.layouts import ORDER_NAMES, ORDERS

from .errors import InvalidArgument, StaleDescriptor, TransportMismatch, VersionUnsupported

AGENT_VERSION = 1
INBOX_VERSION = 2
MAX_RANKS = 256
# Longest fabric address of any provider known (shm names, EFA's 32 bytes, socket addresses) and room.
MAX_FABRIC_ADDRESS = 512
# Of one agent; machines with most have 32 NICs.
MAX_DOMAINS = 64


@dataclass(frozen=True)
class Cache:
    """One worker's KV cache: a rank's layout (its `kv_heads` are rank 0's), and who has which heads."""

    layout: PageLayout
    shards: ShardMap
    dtype: str


@dataclass(frozen=True)
class Peer:
    """Another agent. The incarnation is its identity, the address only says where it was."""

    incarnation: int
    address: str


@dataclass(frozen=True)
class RemoteRegion:
    """`accesses`: through the endpoints of the inbox; none for a rank that the transfer doesn't write to."""

    accesses: tuple[RemoteAccess, ...]
    length: int


@dataclass(frozen=True)
class RemoteRank:
    """One rank's memory at the other side, and which of its regions holds which layers."""

    regions: tuple[RemoteRegion, ...]
    region_map: RegionMap


@dataclass(frozen=True)
class RemoteInbox:
    """Where a transfer goes, checked."""

    receiver: Peer
    slot: int
    generation: int
    # Of the endpoints, in the order in which the regions' accesses name them.
    endpoints: tuple[bytes, ...]
    cache: Cache
    ranks: tuple[RemoteRank, ...]
    data_parallel_rank: int
    # The receiver waits for the checksum of what is sent.
    checksum: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        """Names the transfer between agents."""
        return self.receiver.incarnation, self.slot, self.generation


def cache_of(layout: PageLayout, kv_heads_total: int, tensor_parallel: int, data_parallel: int, dtype: str) -> Cache:
    """Raises baton_kv's InvalidKvArgument where the numbers don't go together."""
    shards = ShardMap(kv_heads_total, tensor_parallel, data_parallel, mla=layout.order == "MLA")
    return Cache(shards.layout_of(0, layout), shards, dtype)


def sharding_message(cache: Cache) -> common_pb2.Sharding:
    return common_pb2.Sharding(tensor_parallel=cache.shards.tp, data_parallel=cache.shards.dp)


def read_agent(message: common_pb2.AgentDescriptor, transport: str) -> Peer:
    """Raises VersionUnsupported, TransportMismatch, InvalidArgument, baton_rpc's AddressError."""
    if message.version != AGENT_VERSION:
        raise VersionUnsupported("the agent descriptor", message.version, AGENT_VERSION)
    if message.transport != transport:
        raise TransportMismatch(transport, message.transport)
    if not message.incarnation:
        raise InvalidArgument("the agent descriptor's incarnation must not be 0", field="incarnation")
    if not isinstance(parse_address(message.control_address), TcpAddress):
        raise InvalidArgument(
            f"the agent descriptor's control address is {message.control_address!r}: it must be host:port",
            field="control_address",
        )
    return Peer(message.incarnation, message.control_address)


def read_inbox(message: agent_pb2.InboxDescriptor, own: common_pb2.AgentDescriptor) -> RemoteInbox:
    """`own` is this agent.

    Raises VersionUnsupported, TransportMismatch, StaleDescriptor, InvalidArgument, and baton_kv's InvalidKvArgument.
    """
    if message.version != INBOX_VERSION:
        raise VersionUnsupported("the inbox descriptor", message.version, INBOX_VERSION)
    if message.sender_incarnation != own.incarnation:
        # Meant for an agent that ran here before: what its receiver has stopped meanwhile is not known here.
        raise StaleDescriptor(message.sender_incarnation, own.control_address)
    receiver = read_agent(message.receiver, own.transport)
    check_slot(message.slot)
    _check_endpoints(message)
    cache = _read_cache(message)
    if message.data_parallel_rank >= cache.shards.dp:
        raise InvalidArgument(
            f"data-parallel rank {message.data_parallel_rank} must be below {cache.shards.dp}",
            field="data_parallel_rank",
        )
    return RemoteInbox(
        receiver=receiver,
        slot=message.slot,
        generation=message.generation,
        endpoints=tuple(message.endpoints),
        cache=cache,
        ranks=_read_ranks(message, cache),
        data_parallel_rank=message.data_parallel_rank,
        checksum=read_checksum(message.checksum),
    )


def check_slot(slot: int) -> None:
    """Raises InvalidArgument."""
    if slot >= SLOTS:
        raise InvalidArgument(f"slot {slot} must be below {SLOTS}", field="slot")


def read_checksum(kind: int) -> bool:
    """Raises InvalidArgument."""
    if kind not in (agent_pb2.CHECKSUM_UNSPECIFIED, agent_pb2.CHECKSUM_CRC32C):
        raise InvalidArgument(f"there is no checksum {kind}: CHECKSUM_CRC32C, or none", field="checksum")
    return kind == agent_pb2.CHECKSUM_CRC32C


def read_pages(
    source: Sequence[int],
    destination: Sequence[int],
    ours: PageLayout,
    theirs: PageLayout,
    prefix_tokens: int,
    limit: int,
) -> tuple[Sequence[int], Sequence[int]]:
    """The pages of a transfer, numbered one for one as the fabric takes them: in the smaller pages of the two sides.

    At most `limit` of them, each below the pages of its side. Raises InvalidArgument, and baton_kv's InvalidKvArgument
    and LayoutMismatch for lists and page sizes that don't go together.
    """
    sides = (("source_pages", source, ours), ("destination_pages", destination, theirs))
    for field, pages, layout in sides:
        if len(pages) > limit:
            raise InvalidArgument(f"{len(pages)} pages in one transfer, at most {limit}", field=field)
        if pages and max(pages) >= layout.pages:
            raise InvalidArgument(f"{field} names page {max(pages)}, the cache has {layout.pages}", field=field)
    numbers = number_pages(source, destination, ours.page_size, theirs.page_size, prefix_tokens)
    for (field, _, _), chosen in zip(sides, numbers, strict=True):
        if chosen and max(chosen) >= 1 << 32:
            raise InvalidArgument(f"{field} has a part with number {max(chosen)}: 32 bits number them", field=field)
    return numbers


def _check_endpoints(message: agent_pb2.InboxDescriptor) -> None:
    count = len(message.endpoints)
    if not 0 < count <= MAX_DOMAINS or any(not 0 < len(address) <= MAX_FABRIC_ADDRESS for address in message.endpoints):
        raise InvalidArgument(
            f"the inbox must have 1 to {MAX_DOMAINS} endpoints, each of 1 to {MAX_FABRIC_ADDRESS} bytes; it has {count}"
            f", of {[len(address) for address in message.endpoints[:MAX_DOMAINS]]} bytes",
            field="endpoints",
        )
    if len(message.domains) != count or len(set(message.domains)) != count:
        raise InvalidArgument(
            f"the inbox has endpoints in the domains {list(message.domains[:MAX_DOMAINS])}: each of its {count} "
            "endpoints must be in a domain of its own",
            field="domains",
        )


def _read_cache(message: agent_pb2.InboxDescriptor) -> Cache:
    layout, sharding = message.layout, message.sharding
    order = ORDER_NAMES.get(layout.order)
    if order is None:
        raise InvalidArgument(f"layout.order {layout.order} is none of {', '.join(ORDERS)}", field="layout.order")
    if not 0 < sharding.tensor_parallel * sharding.data_parallel <= MAX_RANKS:
        raise InvalidArgument(
            f"{sharding.tensor_parallel} x {sharding.data_parallel} ranks: there must be 1 to {MAX_RANKS}",
            field="sharding",
        )
    rank = PageLayout(
        order, layout.layers, layout.pages, layout.page_size, layout.kv_heads, layout.head_dim, layout.element_size
    )
    return cache_of(rank, layout.kv_heads, sharding.tensor_parallel, sharding.data_parallel, layout.dtype)


def _read_ranks(inbox: agent_pb2.InboxDescriptor, cache: Cache) -> tuple[RemoteRank, ...]:
    by_rank: dict[int, list[common_pb2.RegionDescriptor]] = {rank: [] for rank in range(cache.shards.ranks)}
    for message in inbox.regions:
        if message.rank not in by_rank:
            raise InvalidArgument(f"a region of rank {message.rank}: there are {len(by_rank)} ranks", field="regions")
        by_rank[message.rank].append(message)
    endpoints = {domain: number for number, domain in enumerate(inbox.domains)}
    nowhere: dict[int, int] = {}
    return tuple(
        _read_rank(rank, regions, cache, endpoints if rank // cache.shards.tp == inbox.data_parallel_rank else nowhere)
        for rank, regions in by_rank.items()
    )


def _read_accesses(message: common_pb2.RegionDescriptor, endpoints: Mapping[int, int]) -> tuple[RemoteAccess, ...]:
    """`endpoints`: by domain; none if the region is not written to."""
    domains = [access.domain for access in message.accesses]
    if not 0 < len(domains) <= MAX_DOMAINS or len(set(domains)) != len(domains):
        raise InvalidArgument(
            f"the region of rank {message.rank} is accessed through the domains {domains[:MAX_DOMAINS]}: there must be "
            f"1 to {MAX_DOMAINS} different ones",
            field="regions.accesses",
        )
    if any(access.base + message.length > 1 << 64 for access in message.accesses):
        raise InvalidArgument(f"the region of rank {message.rank} goes beyond 64-bit addresses", field="regions")
    if not endpoints:
        return ()
    missing = [domain for domain in domains if domain not in endpoints]
    if missing:
        raise InvalidArgument(
            f"the region of rank {message.rank} is accessed through domain {missing[0]}, in which the inbox has no "
            f"endpoint: it has {', '.join(map(str, endpoints))}",
            field="regions.accesses",
        )
    return tuple(RemoteAccess(endpoints[access.domain], access.key, access.base) for access in message.accesses)


def _read_rank(
    rank: int, messages: list[common_pb2.RegionDescriptor], cache: Cache, endpoints: Mapping[int, int]
) -> RemoteRank:
    layout = cache.shards.layout_of(rank, cache.layout)
    messages.sort(key=lambda message: message.first_layer)
    regions = tuple(RemoteRegion(_read_accesses(message, endpoints), message.length) for message in messages)
    try:
        runs = (
            LayerRun(region, message.first_layer, message.layers or layout.layers)
            for region, message in enumerate(messages)
        )
        region_map = RegionMap(tuple(runs))
        region_map.check(layout, [region.length for region in regions])
    except RegionsMismatch as error:
        raise InvalidArgument(f"the regions of rank {rank} don't hold its cache: {error}", field="regions") from error
    return RemoteRank(regions, region_map)
