"""A real worker around a fake engine and a fake agent, for the tests of servicers."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.v1 import registry_pb2

from baton_config.settings import Settings
from baton_engine.client import EngineClient
from baton_rpc import open_channel
from baton_rpc.layouts import layout_message
from baton_worker.engine_host import EngineHost
from baton_worker.worker import Worker
from conditions import until
from fake_agent import FakeAgent
from fake_engine import Engines, FakeEngine


class Rig:
    """`channel` leads to the worker's service, `agent` is its node's agent, `engine` its model process."""

    def __init__(self, agent: FakeAgent | None, engines: Engines, worker: Worker, channel: grpc.aio.Channel) -> None:
        self.agent = agent
        self.engines = engines
        self.worker = worker
        self.channel = channel

    @property
    def engine(self) -> FakeEngine:
        return self.engines.last

    @property
    def host(self) -> EngineHost:
        return self.worker.engine

    @property
    def pool(self) -> Any:
        return self.host.reserver.pool

    @property
    def layout(self) -> Any:
        return layout_message(self.host.layout, self.host.info.dtype, self.host.info.kv_heads)

    async def idle(self) -> None:
        """Every page is back, every task of the worker has ended."""
        await until(lambda: self.pool.free == self.pool.total, f"all pages free: {self.pool.owners}")
        await until(lambda: len(self.worker.background) == 0, "the end of all background work")


@contextlib.asynccontextmanager
async def worker_rig(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    role: "registry_pb2.WorkerRole.ValueType",
    metrics: Any,
    hooks: Any,
    add: Callable[[Worker], None],
    *,
    section: dict[str, Any] | None = None,
    with_agent: bool = True,
    automatic: bool = False,
    **info: Any,
) -> AsyncIterator[Rig]:
    (tmp_path / "model.gguf").touch()
    agent = await FakeAgent().start() if with_agent else None
    engines = Engines({"agent": agent, "automatic": automatic, **info})
    monkeypatch.setattr(EngineClient, "start", engines.start)
    options = {"page_size": 4, "chunk_tokens": 8, "metrics": "", **(section or {})}
    settings = Settings(
        model={"name": str(tmp_path / "model.gguf")},
        agent={"socket": agent.target if agent else "unix:/nowhere"},
        prefill=options if role == registry_pb2.WORKER_ROLE_PREFILL else {},
        decode={} if role == registry_pb2.WORKER_ROLE_PREFILL else options,
    )
    its_section = settings.prefill if role == registry_pb2.WORKER_ROLE_PREFILL else settings.decode
    engines_of_worker = getattr(its_section, "data_parallel", 1)
    worker = Worker(settings, its_section, role, metrics, hooks, with_agent=with_agent, data_parallel=engines_of_worker)
    add(worker)
    made = worker._make_engines()
    await made.start()
    await worker._server.start()
    try:
        if with_agent:
            await worker.engine.link.session(5)
        async with open_channel(worker._server.addresses[0]) as channel:
            yield Rig(agent, engines, worker, channel)
    finally:
        await worker._server.stop(0)
        await worker.background.drain(1)
        await made.stop()
        await worker._close()
        if agent is not None:
            await agent.close()
