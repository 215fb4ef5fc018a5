"""One life of an engine: its model processes with a page pool, a scheduler and a place at the agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton_engine.client import EngineClient
from baton_engine.errors import EngineError
from baton_engine.messages import AgentLost, EngineInfo, EngineSpec, Loading, StepPlan, StepResult
from baton_engine.scheduler import Scheduler
from baton_kv.layout import PageLayout
from baton_kv.pool import PagePool
from baton_kv.prefix import PageChain
from baton_kv.shards import ShardMap
from baton_worker.agent_link import AgentLink
from baton_worker.background import first_of
from baton_worker.engine_actor import EngineActor, StepHooks
from baton_worker.errors import AgentUnavailable
from baton_worker.prefixes import PrefixNames
from baton_worker.reservation import PageReserver

log = logging.getLogger(__name__)


class EngineHost:
    """Dies as a whole with its model processes: what was in the cache is gone, so nothing of it is kept.

    One data-parallel rank of a worker: see `WorkerEngines`, which owns it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        chunk_tokens: int | None,
        max_waiting: int,
        start_timeout_s: float,
        prefix_cache: bool = False,
        hooks: StepHooks,
        on_change: Callable[[], None],
        on_step: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        """`chunk_tokens` None: what the engine measured. `on_change`: `alive` may answer differently now."""
        self._spec = spec
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._start_timeout_s = start_timeout_s
        self._prefix_cache = prefix_cache
        self._hooks = hooks
        self._on_change = on_change
        self._on_step = on_step
        self._link: AgentLink | None = None
        self._alive = False

    client: EngineClient
    actor: EngineActor
    reserver: PageReserver
    _names: PrefixNames

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def dp_rank(self) -> int:
        """Which of the worker's engines this is."""
        return self._spec.dp_rank

    @property
    def layout(self) -> PageLayout:
        """The engine's cache, as if one rank held it."""
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
        """Of the whole worker."""
        return ShardMap(self.info.kv_heads, self.info.ranks, self._spec.data_parallel, mla=self.info.order == "MLA")

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
        return self._names.chain(prompt, salt) if self._prefix_cache else None

    def join_link(self, link: AgentLink) -> None:
        """From now on the worker's engines are at the agent through `link`, which their owner keeps."""
        self._link = link

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
        log.info(
            "engine ready: %s, %d pages of %d tokens, prompts in chunks of %d",
            self.info.model,
            self.info.pages,
            self.info.page_size,
            self._chunk,
        )

    @property
    def _chunk(self) -> int:
        chunk_tokens = self._chunk_tokens or self.info.chunk_tokens
        assert chunk_tokens is not None, "neither given nor measured"
        return chunk_tokens

    async def _begin(self) -> None:
        self._names = PrefixNames(self.info)
        self.reserver = PageReserver(PagePool(self.info.pages), self._max_waiting)
        scheduler = Scheduler(chunk_tokens=self._chunk, max_batch=self.info.max_batch, page_size=self.info.page_size)
        self.actor = EngineActor(self.client, scheduler, self.reserver, self._hooks, self._on_step)
        await self.actor.start()

    async def join(self) -> None:
        """Until a model process or the scheduler fails; raises what it failed of, with everything torn down."""
        acting = asyncio.create_task(self.actor.join())
        try:
            await first_of(acting, self.client.exited)
        finally:
            acting.cancel()
        failure: BaseException | None = None
        if self.client.exited.done():
            failure = self.client.exited.result()
        elif not acting.cancelled():
            failure = acting.exception()
        failure = failure or EngineError("the scheduler stopped")
        await self.stop(f"the engine failed: {failure}")
        raise failure

    async def stop(self, why: str = "the worker is shutting down") -> None:
        """Whoever is served or waits for pages is told `why`. Idempotent."""
        self._alive = False
        self._on_change()
        self.actor.ending = why
        self.reserver.close(why)
        await self.actor.stop()
        await self.client.stop()

    def _agent_lost(self, lost: AgentLost) -> None:
        if self._link is not None:
            self._link.agent_gone(lost.session)

    @staticmethod
    def _report(progress: Loading) -> None:
        log.info("loading: %s (%d %%)", progress.stage, round(progress.fraction * 100))
