"""Prefill and decode sharded in every pair of ways that the heads allow, with real models through real agents.

Every rank is a thread with its own model shard, cache and layer counter; the agents are processes. What arrives is what
the source's ranks hold together, cut as the destination's layout has it, to the bit; it is what the destination would
have computed by itself, up to the order of its sums; and the destination goes on with the tokens of an engine of one
rank.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from agent_kit import Worker, worker
from agent_processes import Agent, agents
from baton_engine.messages import EngineSpec, SequenceStart, StepItem, StepPlan
from baton_engine.offering import offer_cache
from baton_engine.ranks import engine_specs
from baton_kv.layout import PageLayout
from baton_kv.plan import chunk_pages, expected_extents
from baton_kv.shards import ShardingImpossible, ShardMap
from baton_memory import Handoff, HandoffConnection, LayerCounter, SharedMemory, hand_over
from conditions import until
from engine_driver import GREEDY, Driver
from engine_threads import ThreadEngine
from small_deepseek import SmallDeepseek
from small_models import SmallModel

PAGES, PAGE_SIZE, VOCABULARY = 32, 4, 64
PROMPT = tuple((11 * at + 5) % VOCABULARY for at in range(22))
CUTS = (0, 6, 13, len(PROMPT) - 1)
# The sequence's pages on either side: runs, and pages on their own, the last one partly filled.
OURS, THEIRS = (9, 10, 11, 3, 20, 21), (30, 5, 6, 7, 2, 14, 15, 16)
MOVED = -(-(len(PROMPT) - 1) // PAGE_SIZE)
NEW_TOKENS = 6
LATENT = 0

pytestmark = pytest.mark.asyncio(loop_scope="module")


def possible(heads: int, tp: int) -> bool:
    try:
        ShardMap(heads or 1, tp, mla=heads == LATENT)
    except ShardingImpossible:
        return False
    return True


TP = range(1, 5)
PAIRS = [
    (heads, (source, 1), (destination, 1))
    for heads in range(9)
    for source, destination in itertools.product(TP, TP)
    if possible(heads, source) and possible(heads, destination)
]
# Data-parallel ranks of the destination, each of so many tensor-parallel ones.
PAIRS += [
    (heads, (source, 1), shape)
    for heads, shapes in ((LATENT, ((1, 2), (1, 3), (1, 4), (2, 2))), (2, ((1, 2), (2, 2))), (3, ((2, 2),)))
    for source, shape in itertools.product((1, 2), shapes)
]


@dataclass
class Engines:
    """One worker's engines, `tp` ranks each, attached to an agent."""

    engines: list[ThreadEngine]
    shards: ShardMap
    worker: Worker
    steps: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def lead(self) -> ThreadEngine:
        return self.engines[0]


@dataclass
class Bench:
    """Both nodes' agents, and the engines of one model."""

    prefill: Agent
    decode: Agent
    spec: EngineSpec
    heads: int
    stack: AsyncExitStack
    made: dict[tuple[str, int, int], Engines] = field(default_factory=dict)

    async def side(self, agent: str, tp: int, dp: int) -> Engines:
        """The same for every test that asks for it: loading and attaching cost more than a transfer."""
        key = agent, tp, dp
        if key not in self.made:
            specs = engine_specs(
                EngineSpec(model_path=self.spec.model_path, pages=PAGES, page_size=PAGE_SIZE, ranks=tp), dp
            )
            engines = [ThreadEngine(spec) for spec in specs]
            ranks = [Rank(engine, rank) for engine in engines for rank in range(tp)]
            for each in (*engines, *ranks):
                self.stack.callback(each.close)
            target = (self.prefill if agent == "prefill" else self.decode).target
            its = await self.stack.enter_async_context(worker(target, *ranks))
            shards = ShardMap(self.heads or 1, tp, dp, mla=self.heads == LATENT)
            self.made[key] = Engines(engines, shards, its)
        return self.made[key]


class Rank:
    """What `Worker.attach` calls."""

    def __init__(self, engine: ThreadEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._connection: HandoffConnection | None = None

    async def attach(self, path: str, session: int) -> None:
        engine, rank = self._engine, self._rank
        self._connection = await asyncio.to_thread(
            offer_cache, engine.executors[rank], engine.info, engine.specs[rank], path, session
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@pytest.fixture(scope="module")
def both() -> Iterator[list[Agent]]:
    # Not tmp_path: the paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bt-") as path, agents(Path(path), "tcp", "p", "d") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    request: pytest.FixtureRequest, both: list[Agent], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    heads = request.param
    # Four query heads a KV head, so that up to four ranks can share one.
    model = (
        SmallDeepseek(vocabulary=VOCABULARY)
        if heads == LATENT
        else SmallModel(heads=4 * heads, kv_heads=heads, head_dim=8, vocabulary=VOCABULARY, seed=heads)
    )
    path = model.write_hugging_face(tmp_path_factory.mktemp("shards") / "model")
    async with AsyncExitStack() as stack:
        yield Bench(*both, EngineSpec(model_path=str(path)), heads, stack)


def prefill(
    engine: ThreadEngine, steps: itertools.count[int], pages: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Computes the prompt chunk by chunk; before each chunk its step and positions, for who plans a transfer of it."""
    sequence = 1_000 + next(steps)
    for start, end in itertools.pairwise(CUTS):
        step = next(steps)
        yield step, start, end
        starts = (SequenceStart(sequence, pages, None),) if start == 0 else ()
        engine.run(StepPlan(step, (StepItem(sequence, start, PROMPT[start:end], False, True),), starts))


def whole_pages(engine: ThreadEngine, pages: tuple[int, ...], heads: int) -> torch.Tensor:
    """What all ranks hold of some pages, `[layers, pages, 2, heads, page_size, head_dim]`, or of a latent cache
    `[layers, pages, page_size, latent + rope]`, of which every rank must have the same."""
    found: dict[int, torch.Tensor] = {}
    shards = ShardMap(heads or 1, len(engine.executors), mla=heads == LATENT)
    for rank, executor in enumerate(engine.executors):
        own = torch.frombuffer(executor.memory.buffer, dtype=torch.float32).view(executor.layout.shape)[:, list(pages)]
        for place, head in enumerate(shards.heads_of(rank)):
            part = own if heads == LATENT else own[:, :, :, place]
            assert torch.equal(found.setdefault(head, part.clone()), part), "copies of a head must be equal"
    if heads == LATENT:
        return found[0]
    return torch.stack([found[head] for head in range(heads)], dim=3)


@pytest.mark.parametrize(("bench", "source", "destination"), PAIRS, indirect=["bench"])
async def test_what_arrives_is_what_the_destination_would_have_computed(
    bench: Bench, source: tuple[int, int], destination: tuple[int, int]
) -> None:
    heads = bench.heads
    ours, theirs = await bench.side("prefill", *source), await bench.side("decode", *destination)
    dp_rank = theirs.shards.dp - 1
    engine = theirs.engines[dp_rank]
    others = [other for other in theirs.engines if other is not engine]
    for executor in engine.executors:
        # What an earlier test left there is what should arrive now: no number at all instead.
        torch.frombuffer(executor.memory.buffer, dtype=torch.uint8).fill_(0xFF)
    before = [bytes(executor.memory.buffer) for other in others for executor in other.executors]
    order = engine.info.order
    expected = expected_extents(
        ours.shards,
        theirs.shards,
        order,
        prompt_tokens=len(PROMPT),
        prefix_tokens=0,
        page_size=PAGE_SIZE,
        layers=engine.info.layers,
    )
    inbox = await theirs.worker.open_inbox(ours.worker.agent, expected, dp_rank=dp_rank)
    number = await ours.worker.open_transfer(inbox, OURS, THEIRS[:MOVED])
    seen = len(theirs.worker.events)
    for step, start, end in prefill(ours.lead, ours.steps, OURS):
        chunk = chunk_pages(len(PROMPT), 0, PAGE_SIZE, start, end)
        await ours.worker.submit(step, (number, chunk.start, len(chunk), end == CUTS[-1]))
    await until(lambda: len(theirs.worker.events) > seen)
    assert theirs.worker.events[-1].inbox_full.extents == expected, theirs.worker.events[-1]
    # To the bit: the ranks' own pages, cut in another way.
    arrived = whole_pages(engine, THEIRS[:MOVED], heads)
    assert torch.equal(arrived, whole_pages(ours.lead, OURS, heads))
    assert before == [bytes(executor.memory.buffer) for other in others for executor in other.executors]
    # The destination itself, on other pages.
    own = tuple(page for page in range(PAGES) if page not in THEIRS)[:MOVED]
    for _ in prefill(engine, theirs.steps, own):
        pass
    torch.testing.assert_close(arrived, whole_pages(engine, own, heads), atol=1e-5, rtol=1e-4)
    assert tokens(engine, theirs.steps) == await single(bench)


def tokens(engine: ThreadEngine, steps: itertools.count[int]) -> list[int]:
    """Decodes from the pages that have arrived."""
    sequence, token, drawn = 1_000 + next(steps), PROMPT[-1], []
    for position in range(len(PROMPT) - 1, len(PROMPT) - 1 + NEW_TOKENS):
        starts = (SequenceStart(sequence, THEIRS, GREEDY),) if not drawn else ()
        result = engine.run(StepPlan(next(steps), (StepItem(sequence, position, (token,), True, False),), starts))
        token = result.token_ids[0]
        drawn.append(token)
    return drawn


_single: dict[str, list[int]] = {}


async def single(bench: Bench) -> list[int]:
    """What an engine of one rank answers that computes everything itself."""
    path = bench.spec.model_path
    if path not in _single:
        engine = ThreadEngine(EngineSpec(model_path=path, pages=PAGES, page_size=PAGE_SIZE))
        driver = Driver(engine)  # type: ignore[arg-type]
        (output,) = await driver.run([driver.sequence(PROMPT, NEW_TOKENS)])
        engine.close()
        _single[path] = output.tokens
    return _single[path]


# --- replica sets ---------------------------------------------------------------------------------------------------

TRANSFERS = 200
RANKS = 4


class Copy:
    """A rank of a latent cache whose pages say which rank it is: what no model computes, but shows who sent."""

    layout = PageLayout("MLA", 1, 8, PAGE_SIZE, 1, 4, 4)

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.memory, self.counter = SharedMemory.create("kv", self.layout.region_bytes), LayerCounter.create()
        self.pages = torch.frombuffer(self.memory.buffer, dtype=torch.float32).view(self.layout.shape)

    async def attach(self, path: str, session: int) -> None:
        layout = {
            **{name: getattr(self.layout, name) for name in self.layout.__slots__},
            "kv_heads_total": 1,
            "dtype": "float32",
        }
        offer = Handoff(session, self.rank, self.ranks, layout, [self.memory.region("kv")])
        fds = self.memory.fd, self.counter.memory_fd, self.counter.doorbell_fd
        self.connection = await asyncio.to_thread(hand_over, path, offer, [fds[0]], *fds[1:])

    def close(self) -> None:
        self.connection.close()
        self.counter.close()
        del self.pages
        self.memory.close()


async def test_every_copy_of_a_latent_cache_sends_its_share(both: list[Agent]) -> None:
    """Four ranks have it, one wants it: the agent draws one of them for each transfer. Over 1,000 transfers, and from
    any number of ranks: test_kv_plan."""
    source, destination = [Copy(rank, RANKS) for rank in range(RANKS)], Copy(0, 1)
    for rank, copy in enumerate(source):
        copy.pages.fill_(rank)
    senders: Counter[int] = Counter()
    prefill_agent, decode_agent = both
    async with (
        worker(prefill_agent.target, *source) as sender,
        worker(decode_agent.target, destination) as receiver,
    ):
        source[0].counter.advance(1)
        for _ in range(TRANSFERS):
            destination.pages.fill_(-1.0)
            inbox = await receiver.open_inbox(sender.agent, 2)
            number = await sender.open_transfer(inbox, (1, 2), (5, 3))
            full = len(receiver.events)
            await sender.submit(0, (number, 0, 2, True))
            await until(lambda full=full: len(receiver.events) > full)
            (rank,) = set(destination.pages[0, [5, 3]].flatten().tolist())
            senders[int(rank)] += 1
    for copy in (*source, destination):
        copy.close()
    share = TRANSFERS / RANKS
    assert sorted(senders) == list(range(RANKS))
    assert all(0.9 * share <= count <= 1.1 * share for count in senders.values()), senders
