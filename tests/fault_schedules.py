"""Random fault schedules over a real transport: four agents with real memory, transfers between any two of them,
cancels, closings and ends of sessions at any moment, and faults at every post, completion and arrival.

A schedule is drawn from its seed. Whatever happened, afterwards:
* each transfer ended once, on either side, and nothing waits any more;
* every page is back in its pool, by the workers' rules for letting go;
* what was delivered has the sender's bytes;
* no page changed while nobody owned it;
* with the faults gone, the agents still serve.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from baton.v1 import agent_pb2

from agent_kit import HEADS, LAYERS, PAGE_SIZE, PAGES, Model, Worker, extents
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_fabric.engine import FabricEngine
from baton_fabric.faults import FaultPlan, FaultRule
from baton_kv.pool import PagePool, PoolExhausted
from baton_memory import SharedMemory
from baton_rpc import RemoteError
from conditions import until

AGENTS = 4
# Of each agent, where it has several.
DOMAINS = (1, 2, 3, 2)
# Small pages leave as they are; large ones are still under way when something happens to them.
HEAD_DIMS = (8, 1024)
OPTIONS = AgentOptions(
    stop_timeout=0.6,
    drain_timeout=0.3,
    heartbeat_interval=0.5,
    heartbeat_timeout=2.0,
    heartbeat_misses=5,
    idle_timeout=2.0,
    # So that late immediates meet the next user of their slot.
    slots=4,
)
POST_TIMEOUT_MS = 200
# The sender is done; how long the receiver waits for what may be lost.
SETTLE = 0.15
# Nothing waits for longer: far above every timeout of the agents.
PATIENCE = 30.0


class Broken(AssertionError):
    """A schedule ended as none may."""


@dataclass(frozen=True)
class Planned:
    """One transfer of a schedule."""

    source: int
    destination: int
    pages: int
    chunks: tuple[int, ...]
    plan_first: bool
    # After how many chunks, and milliseconds, who gives up: sender, receiver, or nobody.
    gives_up: str
    after: int
    pause_ms: float
    start_ms: float
    checksum: bool = False
    # Neighbours leave as one write, and a batch of one write is never half posted.
    scattered: bool = False


@dataclass(frozen=True)
class Schedule:
    seed: int
    transfers: tuple[Planned, ...]
    faults: tuple[FaultPlan, ...]
    release_ms: float
    # Whose model processes end, and come again, after so many milliseconds.
    leaves: tuple[tuple[int, float], ...]


def draw(seed: int, several: bool = False) -> Schedule:
    """`several`: some faults are of one domain only."""
    rng = random.Random(seed)
    faults = [[_fault(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))] for _ in range(AGENTS)]
    if rng.random() < 0.7:
        transfers = [_transfer(rng, *rng.sample(range(AGENTS), 2), 6, 20) for _ in range(rng.randint(2, 8))]
    else:
        # One to one, so many that slots are used again while something of their former users is still to come.
        source, destination = rng.sample(range(AGENTS), 2)
        transfers = [
            replace(
                _transfer(rng, source, destination, 2, 0),
                start_ms=rng.uniform(0, 80),
                gives_up=rng.choice(("nobody", "receiver")),
            )
            for _ in range(rng.randint(10, 20))
        ]
        faults[destination].insert(0, FaultRule("arrival", "delay", ms=rng.uniform(5, 60)))
    if several:
        where = random.Random(seed)
        faults = [[replace(rule, domain=where.choice((None, 0, 1))) for rule in rules] for rules in faults]
    leaves = ((rng.randrange(AGENTS), rng.uniform(0, 30)),) if rng.random() < 0.25 else ()
    plans = tuple(FaultPlan(tuple(rules), rng.getrandbits(32)) for rules in faults)
    return Schedule(seed, tuple(transfers), plans, rng.uniform(0, 120), leaves)


def _transfer(rng: random.Random, source: int, destination: int, most_pages: int, latest_ms: float) -> Planned:
    pages = rng.randint(1, most_pages)
    cuts = sorted(rng.sample(range(1, pages), rng.randint(0, min(2, pages - 1))))
    chunks = tuple(b - a for a, b in zip([0, *cuts], [*cuts, pages], strict=True))
    gives_up = rng.choice(("nobody", "nobody", "nobody", "sender", "receiver", "receiver"))
    return Planned(
        source,
        destination,
        pages,
        chunks,
        rng.random() < 0.5,
        gives_up,
        rng.randint(0, len(chunks)),
        rng.choice((0.0, rng.uniform(0, 5))),
        rng.choice((0.0, rng.uniform(0, latest_ms))),
        rng.random() < 0.3,
        rng.random() < 0.7,
    )


def _fault(rng: random.Random) -> FaultRule:
    nth = rng.randint(1, 20)
    once = {"nth": nth, "times": rng.randint(1, 2)}
    some: dict[str, Any] = rng.choice((once, {"probability": rng.uniform(0.02, 0.4)}))
    late = {"ms": rng.choice((rng.uniform(0, 5), rng.uniform(0, 150)))}
    at, action, how = rng.choice(
        (
            ("post", "refuse", some),
            ("post", "refuse", {"nth": nth, "times": rng.randint(1, 40)}),
            ("post", "fail", once),
            ("post", "drop", once),
            ("post", "error", once),
            ("post", "delay", some | late),
            ("post", "hold", once),
            ("completion", "delay", some | late),
            ("completion", "delay", {"ms": rng.uniform(0, 60)}),
            ("completion", "hold", once),
            ("completion", "drop", once),
            ("completion", "error", once),
            ("arrival", "delay", some | late),
            ("arrival", "delay", {"ms": rng.uniform(0, 60)}),
            ("arrival", "hold", once),
            ("arrival", "drop", once),
        )
    )
    return FaultRule(at, action, **how)


class Cache(Model):
    """A model's memory whose pages have owners, and that notices who writes into a page without one."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.memory.close()
        page_bytes = 2 * HEADS * PAGE_SIZE * head_dim * 4
        self.memory = SharedMemory.create("kv", LAYERS * PAGES * page_bytes)
        self.pages = np.frombuffer(self.memory.buffer, dtype=np.uint8).reshape(LAYERS, PAGES, page_bytes)
        self.head_dim = head_dim
        self.pool = PagePool(PAGES)
        self.random = np.random.default_rng(0)
        # What an unowned page must hold.
        self.seal = self.random.integers(0, 256, PAGES, dtype=np.uint8)
        self.pages[:] = self.seal[:, None]
        self.step = 0
        self.stepping = asyncio.Lock()

    def take(self, count: int, owner: str) -> list[int]:
        """Raises PoolExhausted."""
        pages = self.pool.allocate(count, owner)
        self.check(pages)
        return pages

    def fill(self, pages: Sequence[int]) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """Random bytes into these pages -> a copy of them."""
        shape = (LAYERS, len(pages), self.pages.shape[2])
        self.pages[:, pages] = self.random.integers(0, 256, shape, dtype=np.uint8)
        return self.pages[:, pages].copy()

    def let_go(self, pages: Sequence[int], owner: str) -> None:
        self.seal[pages] += 1
        self.pages[:, pages] = self.seal[pages][:, None]
        self.pool.release(owner)

    def check(self, pages: Sequence[int]) -> None:
        changed = (self.pages[:, pages] != self.seal[pages][:, None]).any(axis=(0, 2))
        if changed.any():
            raise Broken(f"pages {np.asarray(pages)[changed].tolist()} changed while nobody owned them")

    def close(self) -> None:
        del self.pages
        super().close()


@dataclass
class Node:
    """An agent with its engine, a worker, and the worker's cache."""

    engine: FabricEngine
    service: TransferAgentService
    cache: Cache
    worker: Worker
    target: str
    # Transfers and inboxes that this node opened, and whether it gave them up itself.
    sent: dict[int, bool] = field(default_factory=dict)
    received: dict[tuple[int, int], bool] = field(default_factory=dict)

    # Whose sessions ended within this schedule.
    former: list[Worker] = field(default_factory=list)

    async def attach(self) -> None:
        await self.worker.describe()
        await self.cache.attach(self.worker.handoff_path, self.worker.session, head_dim=self.cache.head_dim)
        self.worker.follow()
        await self.worker.event("session_ready")

    async def renew(self) -> None:
        """The model process ends, and another takes its place."""
        old, self.worker = self.worker, Worker(self.target)
        self.worker.agent = old.agent
        self.sent = dict.fromkeys(self.sent, True)
        self.received = dict.fromkeys(self.received, True)
        self.cache.leave()
        await _over(old)
        self.former.append(old)
        await self.attach()

    async def close_former(self) -> None:
        while self.former:
            await self.former.pop().close()

    @property
    def at_rest(self) -> bool:
        return self.service.sender.open_transfers == self.service.receiver.open_inboxes == 0


@asynccontextmanager
async def node(
    directory: Path, name: str, transport: str, head_dim: int, domains: Sequence[str] = ("127.0.0.1",)
) -> AsyncIterator[Node]:
    engine = await FabricEngine.start(transport, domains, post_timeout_ms=POST_TIMEOUT_MS)
    addresses = Addresses(f"unix:{directory}/{name}.sock", f"{directory}/{name}.ho", "127.0.0.1:0")
    service = TransferAgentService(engine, engine.provider, "127.0.0.1", addresses, OPTIONS)
    cache = Cache(head_dim)
    try:
        await service.start()
        made = Node(engine, service, cache, Worker(addresses.socket), addresses.socket)
        try:
            await made.attach()
            yield made
        finally:
            await made.close_former()
            await made.worker.close()
    finally:
        await service.stop()
        await engine.close()
        cache.close()


@dataclass
class Fleet:
    nodes: list[Node]
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run(self, schedule: Schedule) -> None:
        """Raises Broken."""
        for each, plan in zip(self.nodes, schedule.faults, strict=True):
            each.engine.set_faults(plan)
        try:
            async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
                for number, planned in enumerate(schedule.transfers):
                    group.create_task(_Run(self, planned, number).run())
                group.create_task(self._release(schedule.release_ms))
                for number, after_ms in schedule.leaves:
                    group.create_task(self._leave(self.nodes[number], after_ms))
        except TimeoutError:
            raise Broken(f"still waiting after {PATIENCE:g} s: {self._levels()}") from None
        except BaseExceptionGroup as failures:
            for each in self.nodes:
                if each.service.failed.done():
                    raise Broken("an agent gave itself up") from each.service.failed.result()
            raise Broken(f"{[repr(each) for each in failures.exceptions]}") from failures
        finally:
            for each in self.nodes:
                # Lets go of what is held, which is late now.
                each.engine.set_faults(FaultPlan())
        await until(lambda: all(each.at_rest for each in self.nodes), "rest", PATIENCE)
        self._account()
        for each in self.nodes:
            await each.close_former()
        await self._serves(schedule.seed)

    async def _release(self, after_ms: float) -> None:
        await asyncio.sleep(after_ms / 1000)
        for each in self.nodes:
            each.engine.release_faults()

    async def _leave(self, node: Node, after_ms: float) -> None:
        await asyncio.sleep(after_ms / 1000)
        await node.renew()
        self.outcomes["session ended"] += 1

    def _levels(self) -> list[tuple[int, int, int]]:
        return [
            (n.service.sender.open_transfers, n.service.receiver.open_inboxes, n.cache.pool.free) for n in self.nodes
        ]

    def _account(self) -> None:
        for number, each in enumerate(self.nodes):
            if each.cache.pool.free != PAGES:
                raise Broken(f"agent {number}: {each.cache.pool.owners()} still own pages")
            each.cache.check(range(PAGES))
            self._one_end_each(number, each)

    def _one_end_each(self, number: int, each: Node) -> None:
        ends: Counter[Any] = Counter()
        for event in (event for worker in (*each.former, each.worker) for event in worker.events):
            kind = event.WhichOneof("event")
            if kind in ("inbox_full", "inbox_failed"):
                inbox = getattr(event, kind)
                ends[inbox.slot, inbox.generation] += 1
            elif kind in ("transfer_done", "transfer_failed"):
                ends[getattr(event, kind).transfer] += 1
        for key, gave_up in [*each.sent.items(), *each.received.items()]:
            count = ends.pop(key, 0)
            if count > 1 or (count == 0 and not gave_up):
                raise Broken(f"agent {number}: {key} ended {count} times")
        each.worker.events.clear()
        each.sent.clear()
        each.received.clear()

    async def _serves(self, seed: int) -> None:
        source, destination = random.Random(~seed).sample(range(AGENTS), 2)
        planned = Planned(source, destination, 2, (2,), True, "nobody", 0, 0.0, 0.0)
        async with asyncio.timeout(PATIENCE):
            # On a machine that stands still for a while a timeout may have its way once more.
            for _ in range(5):
                run = _Run(self, planned, -1)
                await run.run()
                if run.delivered:
                    break
            else:
                raise Broken(f"agent {source} does not reach agent {destination} any more: {run.ends}")
        await until(lambda: all(each.at_rest for each in self.nodes), "rest", PATIENCE)
        self._account()


class _Run:
    """One transfer, as two workers have it done."""

    def __init__(self, fleet: Fleet, planned: Planned, number: int) -> None:
        self._fleet = fleet
        self._planned = planned
        self._owner = f"transfer {number}"
        self._source, self._destination = fleet.nodes[planned.source], fleet.nodes[planned.destination]
        # Those of the sessions in which the transfer is opened.
        self._sender, self._receiver = self._source.worker, self._destination.worker
        self._sent: asyncio.Event = asyncio.Event()
        self._bytes: Any = None
        self.delivered = False
        self.ends: list[str] = []

    async def run(self) -> None:
        await asyncio.sleep(self._planned.start_ms / 1000)
        self._sender, self._receiver = self._source.worker, self._destination.worker
        try:
            target = self._destination.cache.take(self._planned.pages, self._owner + " in")
        except PoolExhausted:
            return
        if self._planned.scattered:
            self._destination.cache.random.shuffle(target)
        try:
            checked = (target, self._planned.pages * PAGE_SIZE) if self._planned.checksum else None
            inbox = await self._receiver.open_inbox(self._sender.agent, extents(self._planned.pages), checked)
        except RemoteError as error:
            self._end(f"inbox refused: {error.reason}")
            self._destination.cache.let_go(target, self._owner + " in")
            return
        self._destination.received[inbox.slot, inbox.generation] = self._receiver is not self._destination.worker
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(inbox, target))
            group.create_task(self._receive(inbox, target))

    def _end(self, how: str) -> None:
        self.ends.append(how)
        self._fleet.outcomes[how] += 1

    # --- the sending worker -----------------------------------------------------------------------------------------

    async def _send(self, inbox: agent_pb2.InboxDescriptor, target: list[int]) -> None:
        cache, worker, owner = self._source.cache, self._sender, self._owner + " out"
        try:
            pages = cache.take(self._planned.pages, owner)
        except PoolExhausted:
            self._sent.set()
            return
        self._bytes = cache.fill(pages)
        try:
            transfer = await worker.open_transfer(inbox, pages, target)
        except RemoteError as error:
            self._end(f"transfer refused: {error.reason}")
        else:
            self._source.sent[transfer] = worker is not self._source.worker
            try:
                await self._steps(transfer)
            except RemoteError as error:
                # The session's end is the proof that nothing reads the pages any more.
                if error.reason != "UNKNOWN_SESSION":
                    raise
                await _over(worker)
            if self._planned.gives_up == "sender" and worker.ended is None:
                self._source.sent[transfer] = True
                await worker.cancel(transfer)
                self._end("sender: gave up")
            else:
                self._end(f"sender: {await self._transfer_end(transfer)}")
        cache.let_go(pages, owner)
        self._sent.set()

    async def _steps(self, transfer: int) -> None:
        cache, worker, planned = self._source.cache, self._sender, self._planned
        first = 0
        for number, pages in enumerate(planned.chunks):
            if planned.gives_up == "sender" and number == planned.after:
                await asyncio.sleep(planned.pause_ms / 1000)
                return
            chunk = transfer, first, pages, first + pages == planned.pages
            first += pages
            async with cache.stepping:
                step, cache.step = cache.step, cache.step + 1
                if planned.plan_first:
                    await worker.submit(step, chunk)
                for layer in range(LAYERS):
                    cache.counter.advance(step * LAYERS + layer + 1)
                if not planned.plan_first:
                    await worker.submit(step, chunk)
        await asyncio.sleep(planned.pause_ms / 1000)

    async def _transfer_end(self, transfer: int) -> str:
        wanted = ("transfer_done", "transfer_failed")
        event = await _first(self._sender, wanted, lambda event: event.transfer == transfer)
        if event is None:
            return "session ended"
        return "done" if isinstance(event, agent_pb2.TransferDone) else event.reason

    # --- the receiving worker ---------------------------------------------------------------------------------------

    async def _receive(self, inbox: agent_pb2.InboxDescriptor, target: list[int]) -> None:
        cache, worker, planned = self._destination.cache, self._receiver, self._planned
        key = inbox.slot, inbox.generation
        ended = asyncio.create_task(
            _first(worker, ("inbox_full", "inbox_failed"), lambda event: (event.slot, event.generation) == key)
        )
        try:
            if planned.gives_up == "receiver":
                await asyncio.wait({ended}, timeout=planned.pause_ms / 1000)
            else:
                sent = asyncio.create_task(self._sent.wait())
                await asyncio.wait({ended, sent}, return_when=asyncio.FIRST_COMPLETED)
                sent.cancel()
                await asyncio.wait({ended}, timeout=SETTLE)
            if ended.done() and isinstance(ended.result(), agent_pb2.InboxFull):
                self._check(target)
                self._end("receiver: full")
            elif ended.done() and ended.result() is None:
                self._end("receiver: session ended")
            elif ended.done():
                self._end(f"receiver: {ended.result().reason}")
            else:
                self._destination.received[key] = True
                self._end("receiver: gave up")
            over = worker.ended is not None or self.delivered
            if not over and (not ended.done() or not ended.result().quiesced):
                await self._close(inbox)
        finally:
            ended.cancel()
        cache.let_go(target, self._owner + " in")
        # Frees the slot, where that is still to do.
        await self._close(inbox)

    async def _close(self, inbox: agent_pb2.InboxDescriptor) -> None:
        while True:
            try:
                outcome = await self._receiver.close_inbox(inbox)
            except RemoteError as error:
                if self._receiver.ended is not None:
                    return
                if error.reason not in ("FENCE_FAILED", "DEADLINE_EXCEEDED"):
                    raise
            else:
                self._fleet.outcomes[f"closed: {agent_pb2.InboxOutcome.Name(outcome)}"] += 1
                return

    def _check(self, target: list[int]) -> None:
        if self._bytes is None or (self._destination.cache.pages[:, target] != self._bytes).any():
            raise Broken(f"{self._owner}: what was delivered is not what was sent")
        self.delivered = True


async def _over(worker: Worker) -> None:
    """Until the session has ended: nothing touches its memory any more."""
    end = await worker.end()
    if end != "OK":
        raise Broken(f"a session ended with {end}")


async def _first(worker: Worker, kinds: Sequence[str], wanted: Any) -> Any:
    """The first event of one of these kinds, whenever it comes; None if the session ends without."""

    def find() -> Any:
        for event in worker.events:
            kind = event.WhichOneof("event")
            if kind in kinds and wanted(getattr(event, kind)):
                return getattr(event, kind)
        return None

    async with worker.changed:
        await worker.changed.wait_for(lambda: find() is not None or worker.ended is not None)
        return find()


@asynccontextmanager
async def fleet(transport: str, head_dim: int, several: bool = False) -> AsyncIterator[Fleet]:
    """`several`: the agents have 1, 2, 3 and 2 domains."""
    domains = [[f"127.0.{number}.{each}" for each in range(1, 1 + count)] for number, count in enumerate(DOMAINS)]
    if not several:
        domains = [["127.0.0.1"]] * AGENTS
    # Not pytest's directory: the paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        directory = Path(name)
        async with (
            node(directory, "a", transport, head_dim, domains[0]) as a,
            node(directory, "b", transport, head_dim, domains[1]) as b,
            node(directory, "c", transport, head_dim, domains[2]) as c,
            node(directory, "d", transport, head_dim, domains[3]) as d,
        ):
            yield Fleet([a, b, c, d])


async def run_schedules(seeds: Iterable[int], transport: str, head_dim: int, several: bool = False) -> Counter[str]:
    """One after the other on one fleet -> how the transfers ended. Raises Broken with the seed."""
    async with fleet(transport, head_dim, several) as made:
        for seed in seeds:
            schedule = draw(seed, several)
            try:
                await made.run(schedule)
            except BaseException as error:
                again = f"--transport {transport} --seed {seed} --schedules 1" + " --several" * several
                error.add_note(f"python tests/bench/fault_schedules.py {again}: {schedule}")
                raise
        return made.outcomes
