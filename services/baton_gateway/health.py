"""Whether the gateway is of use: workers are there, and what is in flight moves."""

from __future__ import annotations

import asyncio
import logging
import time

from baton_gateway.cluster import Cluster
from baton_gateway.errors import NoWorker
from baton_gateway.service import GatewayService
from baton_rpc import RpcServer

logger = logging.getLogger(__name__)

# As long as one attempt at a prefill may take by default, so a prompt that is merely long never looks like a jam.
STALL_SECONDS = 120.0
# How often a stall is looked for while requests are in flight; changes of workers are told at once.
CHECK_SECONDS = 1.0


class Health:
    """Reads progress, not intentions: a recovered cluster is healthy at once, a jammed one is not."""

    def __init__(self, service: GatewayService, stall_s: float = STALL_SECONDS) -> None:
        self._service = service
        self._stall_s = stall_s

    def problem(self) -> dict[str, str] | None:
        """None while healthy; otherwise a machine-readable reason and a message."""
        idle = self._service.progress.idle_for(time.monotonic())
        if idle > self._stall_s:
            waiting = self._service.progress.waiting
            return {
                "reason": "NO_PROGRESS",
                "message": f"{waiting} requests wait for workers and none has moved for {idle:.0f} s",
            }
        try:
            self._service.require_route()
        except NoWorker as error:
            return {"reason": error.reason, "message": str(error)}
        return None


class HealthReporter:
    """Keeps the standard gRPC health of one service in step."""

    def __init__(self, health: Health, cluster: Cluster, server: RpcServer, service: str) -> None:
        self._health = health
        self._cluster = cluster
        self._server = server
        self._service = service
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._report(), name="health reporter")

    async def join(self) -> None:
        """Until `stop`; raises what the reporting failed of."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _report(self) -> None:
        told: bool | None = None
        while True:
            changed = self._cluster.changed
            problem = self._health.problem()
            serving = problem is None
            if serving != told:
                await self._server.set_serving(self._service, serving)
                logger.info("serving" if problem is None else f"not serving: {problem['message']}")
                told = serving
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue
