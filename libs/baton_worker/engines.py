"""All of a worker's engines: its data-parallel ranks, and their one place at the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

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


def waiting_requests(hosts: Sequence[EngineHost]) -> int:
    """Requests of which nothing has been computed yet. Those that wait for pages wait at all engines."""
    waiting = max((host.reserver.waiting for host in hosts), default=0)
    return waiting + sum(host.actor.scheduler.waiting for host in hosts)


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

        Where none has them, the request waits in the queues of all and takes the first that come: nobody waits for one
        engine while another is idle, nor is overtaken there. Raises as `PageReserver.reserve`.
        """
        loads = [self._load(host, chain) for host in self.hosts]
        chosen = place(loads, count)
        host = self.hosts[chosen]
        if len(self.hosts) == 1 or loads[chosen].has_room(count):
            return host, await host.reserver.reserve(owner, count, timeout, chain)
        # The chosen one first: what it says counts if all refuse.
        hosts = [host, *(other for other in self.hosts if other is not host)]
        waits = [asyncio.create_task(each.reserver.reserve(owner, count, timeout, chain)) for each in hosts]
        granted: list[int] = []
        try:
            while not granted and not all(wait.done() for wait in waits):
                await first_of(*(wait for wait in waits if not wait.done()))
                granted = [number for number, wait in enumerate(waits) if wait.done() and not wait.exception()]
        finally:
            # Nothing is awaited any more, so that no cancellation can come between these and the return.
            for number, wait in enumerate(waits):
                if not wait.done():
                    wait.cancel()
                elif not wait.exception() and number not in granted[:1]:
                    hosts[number].reserver.release(owner)
        number = granted[0] if granted else 0
        return hosts[number], waits[number].result()

    @staticmethod
    def _load(host: EngineHost, chain: PageChain | None) -> EngineLoad:
        pool, scheduler = host.reserver.pool, host.actor.scheduler
        prefix = pool.match(chain.keys) if chain is not None else []
        return EngineLoad(
            free=pool.free,
            waiting=host.reserver.waiting,
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
