"""One life of the engine: a model process with its page pool, its scheduler and its place at the agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from baton_engine.client import EngineClient
from baton_engine.errors import EngineError
from baton_engine.messages import AgentLost, EngineInfo, EngineSpec, Loading, StepPlan, StepResult
from baton_engine.scheduler import Scheduler
from baton_kv.layout import PageLayout
from baton_kv.pool import PagePool
from baton_kv.prefix import PageChain
from baton_kv.shards import ShardMap
from baton_worker.agent_link import AgentLink
from baton_worker.agent_session import AgentSession
from baton_worker.background import first_of
from baton_worker.engine_actor import EngineActor, StepHooks
from baton_worker.errors import AgentUnavailable
from baton_worker.prefixes import PrefixNames
from baton_worker.reservation import PageReserver

log = logging.getLogger(__name__)


class EngineHost:
    """Dies as a whole with its model process: what was in the cache is gone, so nothing of it is kept.

    A `Child` of a supervisor, which makes the next one.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        chunk_tokens: int,
        max_waiting: int,
        start_timeout_s: float,
        prefix_cache: bool = False,
        agent_channel: grpc.aio.Channel | None,
        hooks: StepHooks,
        on_change: Callable[[], None],
        on_step: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        """`agent_channel` None: a worker that moves no pages. `on_change`: `ready` may answer differently now."""
        self._spec = spec
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._start_timeout_s = start_timeout_s
        self._prefix_cache = prefix_cache
        self._agent_channel = agent_channel
        self._hooks = hooks
        self._on_change = on_change
        self._on_step = on_step
        self._link: AgentLink | None = None
        self._alive = False
        self._ending = "the worker is shutting down"

    client: EngineClient
    actor: EngineActor
    reserver: PageReserver

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def layout(self) -> PageLayout:
        """This rank's cache."""
        info = self.info
        return PageLayout(
            order=info.order,
            layers=info.layers,
            pages=info.pages,
            page_size=info.page_size,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            element_size=info.element_size,
        )

    @property
    def shard_map(self) -> ShardMap:
        return ShardMap(self.info.kv_heads, self.info.ranks, mla=self.info.order == "MLA")

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def link(self) -> AgentLink:
        """Raises AgentUnavailable for a worker without an agent."""
        if self._link is None:
            raise AgentUnavailable("this worker runs without a transfer agent")
        return self._link

    def chain(self, prompt: Sequence[int], salt: str = "") -> PageChain | None:
        """What a prompt's pages are called in the prefix cache; None if there is none."""
        return PrefixNames(self.info).chain(prompt, salt) if self._prefix_cache else None

    @property
    def session(self) -> AgentSession | None:
        return self._link.current if self._link is not None else None

    @property
    def ready(self) -> bool:
        """Able to serve: the model is loaded and, if there is an agent, attached to it."""
        return self._alive and (self._link is None or self.session is not None)

    async def start(self) -> None:
        self.client = await EngineClient.start(
            self._spec,
            on_progress=self._report,
            on_agent_lost=self._agent_lost,
            timeout_s=self._start_timeout_s,
        )
        try:
            await self._begin()
        except BaseException:
            await self.client.stop(grace_s=0.0)
            raise
        self._alive = True
        self._on_change()
        log.info("engine ready: %s, %d pages of %d tokens", self.info.model, self.info.pages, self.info.page_size)

    async def _begin(self) -> None:
        self.reserver = PageReserver(PagePool(self.info.pages), self._max_waiting)
        scheduler = Scheduler(
            chunk_tokens=self._chunk_tokens, max_batch=self.info.max_batch, page_size=self.info.page_size
        )
        self.actor = EngineActor(self.client, scheduler, self.reserver, self._hooks, self._on_step)
        await self.actor.start()
        if self._agent_channel is not None:
            self._link = AgentLink(self.client, self._agent_channel, self._on_change)
            self._link.start()

    async def join(self) -> None:
        """Until the model process, the scheduler or the link to the agent fails; raises what it failed of, with
        everything torn down."""
        parts = [asyncio.create_task(self.actor.join())]
        if self._link is not None:
            parts.append(asyncio.create_task(self._link.join()))
        try:
            await first_of(*parts, self.client.exited)
        finally:
            for part in parts:
                part.cancel()
        failures = [part.exception() for part in parts if part.done() and not part.cancelled()]
        failure = next((error for error in failures if error), EngineError("the scheduler stopped"))
        if self.client.exited.done():
            failure = self.client.exited.result()
        self._ending = self.actor.ending = f"the engine failed: {failure}"
        await self.stop()
        raise failure

    async def stop(self) -> None:
        """Idempotent."""
        self._alive = False
        self._on_change()
        self.reserver.close(self._ending)
        await self.actor.stop()
        # The model process first: the end of its hand-off connection is what ends the session at the agent.
        await self.client.stop()
        if self._link is not None:
            await self._link.stop()

    def _agent_lost(self, lost: AgentLost) -> None:
        if self._link is not None:
            self._link.agent_gone(lost.session)

    @staticmethod
    def _report(progress: Loading) -> None:
        log.info("loading: %s (%d %%)", progress.stage, round(progress.fraction * 100))
