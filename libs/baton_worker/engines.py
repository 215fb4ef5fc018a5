"""All of a worker's engines: its data-parallel ranks, and their one place at the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from baton_engine.errors import EngineError
from baton_engine.messages import EngineInfo
from baton_kv.layout import PageLayout
from baton_kv.prefix import PageChain
from baton_kv.shards import ShardMap
from baton_worker.agent_link import AgentLink
from baton_worker.agent_session import AgentSession
from baton_worker.background import first_of
from baton_worker.engine_host import EngineHost
from baton_worker.placement import EngineLoad, place
from baton_worker.reservation import Reservation


@dataclass(eq=False)
class _Waiting:
    """A request in the queue of one engine, which another may take: then `elsewhere` says which."""

    owner: Hashable
    count: int
    chain: PageChain | None
    home: EngineHost
    elsewhere: asyncio.Future[tuple[EngineHost, Reservation]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WorkerEngines:
    """One life of them. Each has model processes, page pool and scheduler of its own; the agent knows them as one
    session, so they die together: with the first that ends, or with the link to the agent.

    A `Child` of a supervisor, which makes the next ones.
    """

    def __init__(
        self, hosts: Sequence[EngineHost], agent_channel: grpc.aio.Channel | None, on_change: Callable[[], None]
    ) -> None:
        """`hosts` in order of data-parallel rank, one at least. `agent_channel` None: a worker that moves no pages.
        `on_change`: `ready` may answer differently now."""
        self.hosts = hosts
        self._agent_channel = agent_channel
        self._on_change = on_change
        self._link: AgentLink | None = None
        # In order of arrival.
        self._waiting: list[_Waiting] = []

    @property
    def info(self) -> EngineInfo:
        """What is loaded, the same in all."""
        return self.hosts[0].info

    @property
    def layout(self) -> PageLayout:
        """The cache of one engine, as if one rank held it."""
        return self.hosts[0].layout

    @property
    def shard_map(self) -> ShardMap:
        """Of the whole worker."""
        return self.hosts[0].shard_map

    @property
    def alive(self) -> bool:
        return all(host.alive for host in self.hosts)

    @property
    def session(self) -> AgentSession | None:
        return self._link.current if self._link is not None else None

    @property
    def ready(self) -> bool:
        """Able to serve: every model is loaded and, if there is an agent, attached to it."""
        return self.alive and (self._agent_channel is None or self.session is not None)

    def chain(self, prompt: Sequence[int], salt: str = "") -> PageChain | None:
        """What a prompt's pages are called in the prefix caches; None if there are none."""
        return self.hosts[0].chain(prompt, salt)

    async def reserve(
        self, owner: Hashable, count: int, timeout: float | None, chain: PageChain | None
    ) -> tuple[EngineHost, Reservation]:
        """`count` pages of one of the engines in the name of `owner`, and the engine; `chain` names those that it may
        find in a prefix cache.

        Where none has them, the request waits in the queue of one, and another takes it that has them first and where
        nobody waits. Raises as `PageReserver.reserve`.
        """
        loads = [self._load(host, chain) for host in self.hosts]
        chosen = place(loads, count)
        home = self.hosts[chosen]
        if len(self.hosts) == 1 or loads[chosen].has_room(count):
            return home, await home.reserver.reserve(owner, count, timeout, chain)
        waiting = _Waiting(owner, count, chain, home)
        self._waiting.append(waiting)
        at_home = asyncio.create_task(home.reserver.reserve(owner, count, timeout, chain))
        given: tuple[EngineHost, Reservation] | None = None
        try:
            await first_of(at_home, waiting.elsewhere)
            given = waiting.elsewhere.result() if waiting.elsewhere.done() else (home, at_home.result())
        finally:
            # Nothing is awaited here, so that no cancellation can come between this and the return.
            self._waiting.remove(waiting)
            if not at_home.done():
                at_home.cancel()
            elif not at_home.exception() and (given is None or given[0] is not home):
                home.reserver.release(owner)
            if waiting.elsewhere.done() and given is None:
                waiting.elsewhere.result()[0].reserver.release(owner)
        return given

    def _take_over(self, host: EngineHost) -> None:
        """`host` has let go of pages that nobody waits for there: others' requests may have them."""
        for waiting in list(self._waiting):
            if waiting.home is host or waiting.elsewhere.done():
                continue
            reservation = host.reserver.reserve_now(waiting.owner, waiting.count, waiting.chain)
            if reservation is not None:
                waiting.elsewhere.set_result((host, reservation))

    def _load(self, host: EngineHost, chain: PageChain | None) -> EngineLoad:
        pool, scheduler = host.reserver.pool, host.actor.scheduler
        prefix = pool.match(chain.keys) if chain is not None else []
        return EngineLoad(
            free=pool.free,
            # Those that have come just now are not in the queue yet.
            waiting=max(host.reserver.waiting, sum(waiting.home is host for waiting in self._waiting)),
            requests=scheduler.running + scheduler.waiting,
            cached=len(prefix),
            idle=pool.free - pool.available(prefix),
            max_batch=host.info.max_batch,
        )

    async def start(self) -> None:
        """Raises what the first engine that does not start fails of; none is left then."""
        starting = [asyncio.create_task(host.start()) for host in self.hosts]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(host.stop() for host in self.hosts if host.alive))
            raise
        if len(self.hosts) > 1:
            for host in self.hosts:
                host.reserver.on_spare = partial(self._take_over, host)
        if self._agent_channel is not None:
            self._link = AgentLink([host.client for host in self.hosts], self._agent_channel, self._on_change)
            for host in self.hosts:
                host.join_link(self._link)
            self._link.start()
        self._on_change()

    async def join(self) -> None:
        """Until an engine or the link to the agent fails; raises what it failed of, with everything torn down."""
        parts = [asyncio.create_task(host.join()) for host in self.hosts]
        if self._link is not None:
            parts.append(asyncio.create_task(self._link.join()))
        try:
            await first_of(*parts)
        finally:
            for part in parts:
                if not part.done():
                    part.cancel()
        failures = [part.exception() for part in parts if part.done() and not part.cancelled()]
        failure = next((error for error in failures if error), EngineError("the link to the agent ended"))
        await self.stop(f"the engine failed: {failure}")
        raise failure

    async def stop(self, why: str = "the worker is shutting down") -> None:
        """Idempotent."""
        # The model processes first: the end of their hand-off connections is what ends the session at the agent.
        await asyncio.gather(*(host.stop(why) for host in self.hosts))
        if self._link is not None:
            await self._link.stop()
