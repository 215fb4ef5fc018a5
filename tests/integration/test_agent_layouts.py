"""Two workers whose caches lie differently, through two agents: shards, page sizes and orders, byte by byte."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from baton.v1 import agent_pb2, agent_pb2_grpc

from agent_kit import worker
from agent_processes import Agent, agents
from baton_kv.layout import Order, PageLayout
from baton_kv.plan import chunk_pages, common_page_size, expected_extents
from baton_kv.shards import ShardMap
from baton_memory import Handoff, LayerCounter, SharedMemory, hand_over
from baton_rpc import open_channel
from fabric_harness import fabrics
from kv_sides import DIM, Side, tokens_of

LAYERS, PAGES, HEADS = 3, 24, 3


@pytest.fixture(scope="module", params=fabrics("tcp", "shm", "local"))
def pair(request: pytest.FixtureRequest) -> Iterator[list[Agent]]:
    """A prefill and a decode node's agent, which serve one pair of workers after the other."""
    # Not tmp_path: the paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bt-") as path, agents(Path(path), request.param, "p", "d") as both:
        yield both


@pytest.fixture(scope="module")
def several() -> Iterator[list[Agent]]:
    """Two agents with 2 and 3 domains."""
    domains = {"p": "127.0.0.2+127.0.0.3", "d": "127.0.0.4+127.0.0.5+127.0.0.6"}
    with (
        tempfile.TemporaryDirectory(prefix="bt-") as path,
        agents(Path(path), "tcp", "p", "d", domains=domains) as both,
    ):
        yield both


class RankProcess:
    """What one rank's model process does when it attaches. `Worker.attach` calls it."""

    def __init__(self, side: Side, rank: int, memories: list[SharedMemory], counter: LayerCounter) -> None:
        self.side, self.rank, self.memories, self.counter = side, rank, memories, counter

    async def attach(self, path: str, session: int) -> None:
        own, shards = self.side.rank_layout(self.rank), self.side.shards
        layout = {
            "order": own.order,
            "layers": own.layers,
            "pages": own.pages,
            "page_size": own.page_size,
            "kv_heads": own.kv_heads,
            "kv_heads_total": shards.heads,
            "head_dim": own.head_dim,
            "element_size": own.element_size,
            "dtype": "float16",
        }
        regions = [memory.region("kv") for memory in self.memories]
        if len(regions) > 1:
            regions = [{**region, "layers": n} for region, n in zip(regions, self.side.splits, strict=True)]
        offer = Handoff(session, self.rank, shards.ranks, layout, regions, data_parallel=shards.dp)
        fds = [memory.fd for memory in self.memories]
        self.connection = await asyncio.to_thread(
            hand_over, path, offer, fds, self.counter.memory_fd, self.counter.doorbell_fd
        )


class Engine:
    """One worker's model processes, in this process."""

    def __init__(self, stack: ExitStack, layout: PageLayout, shards: ShardMap, pages: list[int], splits: list[int]):
        """Each data-parallel rank has a layer counter of its own."""
        memories: list[SharedMemory] = []

        def allocate(length: int) -> memoryview:
            memories.append(SharedMemory.create("kv", length))
            stack.callback(memories[-1].close)
            return memories[-1].buffer

        self.counters = [LayerCounter.create() for _ in range(shards.dp)]
        for counter in self.counters:
            stack.callback(counter.close)
        self.side = Side(layout, shards, pages, splits, allocate)
        # Views of the memory go before it is closed.
        stack.callback(self.side.regions.clear)
        self.ranks = [
            RankProcess(
                self.side,
                rank,
                memories[rank * len(splits) : (rank + 1) * len(splits)],
                self.counters[rank // shards.tp],
            )
            for rank in range(shards.ranks)
        ]
        for rank in self.ranks:
            stack.callback(lambda rank=rank: rank.connection.close())


CASES: dict[str, tuple[Order, tuple[int, int], tuple[int, int]]] = {
    "smaller pages at the source": ("HND", (4, 8), (1, 1)),
    "larger pages at the source": ("HND", (8, 4), (1, 1)),
    "smaller pages, 2 ranks of 2 and 1 heads into 3": ("HND", (4, 8), (2, 3)),
    "larger pages, 3 ranks into 2": ("HND", (8, 2), (3, 2)),
    "tokens outside, smaller pages": ("NHD", (2, 8), (1, 1)),
    "tokens outside, larger pages, 3 ranks into 2": ("NHD", (8, 4), (3, 2)),
    "tokens outside, one size": ("NHD", (4, 4), (2, 3)),
    "latent, smaller pages, 2 copies into 3": ("MLA", (4, 8), (2, 3)),
    "latent, larger pages": ("MLA", (8, 2), (3, 1)),
}


@pytest.mark.parametrize("case", CASES)
async def test_every_token_arrives_where_it_belongs(pair: list[Agent], case: str) -> None:
    order, sizes, tps = CASES[case]
    await transfer(pair, order, sizes, tps, ([LAYERS], [LAYERS]))


@pytest.mark.parametrize(
    "splits",
    [([1, 1, 1], [3]), ([3], [2, 1]), ([2, 1], [1, 2]), ([1, 1, 1], [1, 1, 1])],
    ids=["one a layer to one", "one to two", "two to two others", "one a layer"],
)
@pytest.mark.parametrize("case", ["smaller pages, 2 ranks of 2 and 1 heads into 3", "latent, larger pages"])
async def test_caches_over_several_regions(pair: list[Agent], case: str, splits: tuple[list[int], list[int]]) -> None:
    await transfer(pair, *CASES[case], splits)


@pytest.mark.parametrize("case", ["smaller pages, 2 ranks of 2 and 1 heads into 3", "latent, larger pages"])
async def test_one_data_parallel_rank_of_several_on_either_side(pair: list[Agent], case: str) -> None:
    await transfer(pair, *CASES[case], ([LAYERS], [2, 1]), ((1, 2), (2, 3)))


@pytest.mark.parametrize("case", CASES)
async def test_every_token_arrives_over_several_domains(several: list[Agent], case: str) -> None:
    prefill, decode = several
    await transfer(several, *CASES[case], ([LAYERS], [2, 1]))
    writes = [domain.writes for domain in await domains_of(prefill)]
    arrived = [domain.immediates for domain in await domains_of(decode)]
    assert sum(writes) == sum(arrived)
    assert all(writes), "each domain had its turn"
    assert all(arrived)


async def test_agents_say_what_they_have_open(several: list[Agent]) -> None:
    found = await domains_of(several[1])
    assert [domain.name for domain in found] == ["127.0.0.4", "127.0.0.5", "127.0.0.6"]
    for domain in found:
        assert domain.address == domain.name
        assert domain.provider
        assert list(domain.serves)[-1] == "host"


async def domains_of(agent: Agent) -> list[agent_pb2.FabricDomain]:
    async with open_channel(agent.target) as channel:
        request = agent_pb2.DescribeRequest()
        answer = await agent_pb2_grpc.TransferAgentStub(channel).Describe(request, wait_for_ready=True)
        return list(answer.domains)


async def transfer(
    pair: list[Agent],
    order: Order,
    sizes: tuple[int, int],
    tps: tuple[int, int],
    splits: tuple[list[int], list[int]],
    dp_ranks: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (0, 1)),
) -> None:
    """A prompt in three chunks, of which the destination has the first page. `dp_ranks`: for each side the
    data-parallel rank that takes part, and of how many."""
    ((ours_dp, _), (theirs_dp, _)) = dp_ranks
    mla = order == "MLA"
    prompt, prefix, cuts = 46, sizes[1], (0, 13, 30, 45)
    done, size = prompt - 1, common_page_size(*sizes)
    shards = [ShardMap(1 if mla else HEADS, tp, dp, mla=mla) for tp, (_, dp) in zip(tps, dp_ranks, strict=True)]
    layouts = [PageLayout(order, LAYERS, PAGES, page_size, 1, DIM, 2) for page_size in sizes]
    # Runs of pages, and pages on their own.
    ours = list(dict.fromkeys([*range(5, 17), *range(PAGES - 1, 1, -2), *range(PAGES)]))[: -(-done // sizes[0])]
    theirs = [*range(9, 3, -1), *range(10, PAGES), *range(4)][: -(-done // sizes[1]) - 1]
    values = tokens_of(LAYERS, prompt, shards[0].heads)
    wanted = Side(layouts[1], shards[1], theirs, splits[1])
    wanted.compute(values, theirs_dp, prefix, done, skipped_pages=1)
    expected = expected_extents(
        *shards,
        order,
        prompt_tokens=prompt,
        prefix_tokens=prefix,
        page_size=sizes[1],
        source_page_size=sizes[0],
        layers=LAYERS,
    )
    with ExitStack() as stack:
        source = Engine(stack, layouts[0], shards[0], ours, splits[0])
        destination = Engine(stack, layouts[1], shards[1], theirs, splits[1])
        prefill, decode = pair
        async with (
            worker(prefill.target, *source.ranks) as sender,
            worker(decode.target, *destination.ranks) as receiver,
        ):
            inbox = await receiver.open_inbox(sender.agent, expected, dp_rank=theirs_dp)
            number = await sender.open_transfer(
                inbox, ours[prefix // sizes[0] :], theirs, prefix_tokens=prefix, dp_rank=ours_dp
            )
            for step, (start, end) in enumerate(pairwise(cuts)):
                chunk = chunk_pages(prompt, prefix, size, start, end)
                await sender.submit(step, (number, chunk.start, len(chunk), end == done))
                source.side.compute(values, ours_dp, start, end)
                source.counters[ours_dp].advance((step + 1) * LAYERS)
            full = await receiver.event("inbox_full")
            finished = await sender.event("transfer_done")
        assert full.extents == finished.stats.extents == expected
        assert destination.side.holds_the_same(wanted)
