"""A worker process: the engine under supervision, its gRPC service, its health, its lease and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc
from baton.v1 import common_pb2, registry_pb2

from baton_actors.lifecycle import first_to_end
from baton_actors.supervisor import Supervisor
from baton_config.models import resolve_model, served_name
from baton_config.sections import WorkerSettings
from baton_config.settings import Settings
from baton_engine.messages import EngineSpec, StepPlan, StepResult
from baton_engine.ranks import engine_specs
from baton_rpc.addresses import advertised_address
from baton_rpc.channel import open_channel
from baton_rpc.layouts import layout_message
from baton_rpc.server import RpcServer
from baton_rpc.tls import tls_files
from baton_telemetry.exposition import MetricsServer
from baton_telemetry.metrics import WorkerMetrics
from baton_worker.agent_session import AgentSession
from baton_worker.background import BackgroundTasks
from baton_worker.channels import ChannelCache
from baton_worker.engine_actor import EngineActor, StepHooks
from baton_worker.engine_host import EngineHost
from baton_worker.engines import WorkerEngines
from baton_worker.errors import EngineUnavailable
from baton_worker.observation import observe
from baton_worker.registration import Registration

log = logging.getLogger(__name__)

# A forward step that takes longer than this is taken for stuck; the slowest step seen, 512 tokens of the default model
# on one busy core, took 3 s.
STALL_S = 60.0
HEALTH_INTERVAL_S = 1.0
SHUTDOWN_GRACE_S = 2.0


class Worker:
    """What the prefill and the decode worker have in common. A servicer is added, then `run` serves until a signal."""

    def __init__(
        self,
        settings: Settings,
        section: WorkerSettings,
        role: registry_pb2.WorkerRole.ValueType,
        metrics: WorkerMetrics,
        hooks: StepHooks,
        *,
        with_agent: bool,
        data_parallel: int = 1,
    ) -> None:
        """`data_parallel`: engines, each with a cache and a scheduler of its own."""
        self.role = role
        self.kind = registry_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
        self.worker_id = section.worker_id or f"{self.kind}-{os.getpid()}"
        self.section = section
        self.background = BackgroundTasks()
        self._settings = settings
        self._metrics = metrics
        self._hooks = hooks
        self._with_agent = with_agent
        self._data_parallel = data_parallel
        self._incarnation = secrets.randbits(64)
        self._sequence_ids = itertools.count(1)
        self._engines: WorkerEngines | None = None
        # The latest, kept to tell a new one from the same.
        self._session: AgentSession | None = None
        self._tls = tls_files(settings.tls)
        credentials = self._tls.channel_credentials() if self._tls else None
        self.peers = ChannelCache(credentials)
        self._registry = open_channel(settings.registry_target, credentials)
        self._agent = open_channel(settings.agent.socket) if with_agent else None
        self._registration = Registration(self._registry, self._describe, self._load)
        self._server = RpcServer([section.listen], tls=self._tls, allow_insecure=settings.tls.allow_insecure)
        self._services: list[str] = []
        self._serving = False
        self._address = ""
        # Once: a restart must not fail of a path that was good at the start.
        self._model_path = str(resolve_model(settings.model.name))
        observe(metrics, lambda: self._engines.hosts if self._engines is not None else ())

    # --- for the servicers ----------------------------------------------------------------------------------------

    @property
    def engines(self) -> WorkerEngines:
        """The present ones; raises EngineUnavailable while there are none."""
        if self._engines is None or not self._engines.alive:
            raise EngineUnavailable("the model process is not there: it is starting, or starting again")
        return self._engines

    @property
    def engine(self) -> EngineHost:
        """The present engine of a worker that has one; raises EngineUnavailable."""
        return self.engines.hosts[0]

    @property
    def max_model_len(self) -> int:
        own = self.engines.info.max_model_len
        limit = self._settings.model.max_model_len
        return own if limit is None else min(own, limit)

    def next_sequence_id(self) -> int:
        """Unique in this process, over all lives of the engine."""
        return next(self._sequence_ids)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service: str) -> None:
        """`register`: the generated add_…Servicer_to_server; `service`: the full name."""
        self._server.add(register, servicer, service)
        self._services.append(service)

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until it is cancelled; raises what the worker cannot serve without."""
        for service in self._services:
            await self._server.set_serving(service, False)
        supervisor = Supervisor(self.worker_id)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            await self._server.start()
            self._address = advertised_address(self._server.addresses[0], self.section.advertise_host)
            metrics = MetricsServer(self._metrics.registry, self._unhealthy)
            await metrics.start(self.section.metrics)
            stack.push_async_callback(metrics.stop)
            await supervisor.start("engine", self._make_engines)
            stack.push_async_callback(supervisor.stop)
            # Refused and cancelled before the engine goes, so that their cleanup still finds it.
            stack.push_async_callback(self.background.drain, SHUTDOWN_GRACE_S)
            stack.push_async_callback(self._server.stop, SHUTDOWN_GRACE_S)
            self._registration.start()
            stack.push_async_callback(self._registration.stop)
            health = asyncio.create_task(self._watch_health(), name="health")
            stack.callback(health.cancel)
            await first_to_end(supervisor.join(), self._registration.join(), health)

    async def _close(self) -> None:
        await self._server.stop(0)
        await self.peers.close()
        await self._registry.close()
        if self._agent is not None:
            await self._agent.close()

    def _make_engines(self) -> WorkerEngines:
        section, model = self.section, self._settings.model
        if self._engines is not None:
            self._metrics.engine_restarts.inc()
        spec = EngineSpec(
            model_path=self._model_path,
            dtype=model.dtype,
            device=model.device,
            graphs=model.cuda_graphs,
            gpus=section.gpus,
            quantization=model.quantization,
            page_size=section.page_size,
            kv_bytes=int(section.kv_bytes),
            threads=section.threads or len(section.cpus) or len(os.sched_getaffinity(0)),
            cpus=section.cpus,
            max_batch=section.max_batch,
            chunk_s=None if section.chunk_tokens else section.chunk_ms / 1e3,
            role=self.kind,
            ranks=section.tensor_parallel,
        )
        hosts = [
            EngineHost(
                each,
                chunk_tokens=section.chunk_tokens,
                max_waiting=section.max_waiting,
                start_timeout_s=section.start_timeout_s,
                prefix_cache=section.prefix_cache,
                hooks=self._hooks,
                on_change=self._engines_changed,
                on_step=self._step_done,
            )
            for each in engine_specs(spec, self._data_parallel)
        ]
        self._engines = WorkerEngines(hosts, self._agent, self._engines_changed)
        return self._engines

    def _engines_changed(self) -> None:
        session = self._engines.session if self._engines is not None else None
        if session is not None and session is not self._session:
            if self._session is not None:
                self._metrics.agent_reconnects.inc()
            self._session = session
        self._registration.changed()

    def _step_done(self, plan: StepPlan, result: StepResult) -> None:
        self._metrics.step_seconds.observe(result.compute_us / 1e6)
        self._metrics.step_tokens.observe(plan.tokens)
        self._metrics.computed_prompt_tokens.inc(sum(len(item.token_ids) for item in plan.prefills))

    # --- what others see ------------------------------------------------------------------------------------------

    def _describe(self) -> registry_pb2.WorkerInfo | None:
        engines = self._engines
        if engines is None or not engines.ready:
            return None
        info, session, shards = engines.info, engines.session, engines.shard_map
        return registry_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self._incarnation,
            address=self._address,
            model=registry_pb2.ModelInfo(
                name=served_name(self._settings.model.name, self._settings.model.served_name),
                fingerprint=info.fingerprint,
                max_model_len=self.max_model_len,
                vocab_size=info.vocab_size,
            ),
            layout=layout_message(engines.layout, info.dtype, info.kv_heads),
            sharding=common_pb2.Sharding(tensor_parallel=shards.tp, data_parallel=shards.dp),
            agent=session.descriptor if session is not None else None,
        )

    def _load(self) -> registry_pb2.WorkerLoad:
        engines = self._engines
        if engines is None or not engines.alive:
            return registry_pb2.WorkerLoad()
        schedulers = [host.actor.scheduler for host in engines.hosts]
        reservers = [host.reserver for host in engines.hosts]
        return registry_pb2.WorkerLoad(
            running_requests=sum(scheduler.running for scheduler in schedulers),
            waiting_requests=sum(host.actor.scheduler.waiting + host.reserver.waiting for host in engines.hosts),
            free_pages=sum(reserver.pool.free for reserver in reservers),
            total_pages=sum(reserver.pool.total for reserver in reservers),
            queued_prompt_tokens=sum(scheduler.queued_prompt_tokens for scheduler in schedulers),
        )

    def _unhealthy(self) -> dict[str, object] | None:
        return None if self._serving else {"reason": "the engine is not ready, or makes no progress"}

    async def _watch_health(self) -> None:
        """Healthy is who can serve and makes progress: a step that does not end is not health."""
        progress: dict[EngineActor, tuple[int, float]] = {}
        while True:
            engines = self._engines
            healthy = engines is not None and engines.ready
            if engines is not None and engines.alive:
                now = time.monotonic()
                for actor in [host.actor for host in engines.hosts]:
                    steps, since = progress.get(actor, (-1, now))
                    if actor.steps_done != steps or actor.scheduler.in_flight is None:
                        since = now
                    progress[actor] = actor.steps_done, since
                    healthy = healthy and now - since < STALL_S
                progress = {host.actor: progress[host.actor] for host in engines.hosts}
            if healthy != self._serving:
                self._serving = healthy
                for service in self._services:
                    await self._server.set_serving(service, healthy)
            await asyncio.sleep(HEALTH_INTERVAL_S)
