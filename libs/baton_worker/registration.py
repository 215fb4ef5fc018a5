"""Announces a worker to the registry and keeps its lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from baton.v1 import registry_pb2, registry_pb2_grpc

from baton_worker.background import first_of

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
# A worker that ends does not wait for its registry: the lease runs out by itself.
LEAVE_TIMEOUT_S = 1.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0
# Whatever time to live a registry grants, it is not asked in a tight loop.
SHORTEST_INTERVAL_S = 0.05


class Registration:
    """Registers as soon as the worker can serve, and again whenever what it announces changes or the lease is lost."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        describe: Callable[[], registry_pb2.WorkerInfo | None],
        load: Callable[[], registry_pb2.WorkerLoad],
    ) -> None:
        """`describe` answers None while the worker cannot serve: then it is not in the registry."""
        self._stub = registry_pb2_grpc.RegistryStub(channel)
        self._describe = describe
        self._load = load
        self._changed = asyncio.Event()
        self._lease: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[int] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="registration")

    def changed(self) -> None:
        """What `describe` answers is different now."""
        self._changed.set()

    async def join(self) -> None:
        """Until `stop`; raises what the registration failed of: a worker without one would never be called."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._registering is not None:
            await first_of(self._registering, timeout=LEAVE_TIMEOUT_S)
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        await self._leave()

    async def _keep(self) -> None:
        delay = FIRST_DELAY_S
        failing = False
        while True:
            self._changed.clear()
            worker = self._describe()
            if worker is None:
                await self._leave()
                await self._changed.wait()
                continue
            try:
                await self._leave()
                worker.load.CopyFrom(self._load())
                # A stop must know the lease that a call under way may bring.
                self._registering = asyncio.create_task(self._register(worker))
                ttl_ms = await asyncio.shield(self._registering)
                delay = FIRST_DELAY_S
                if failing:
                    log.info("registered again")
                failing = False
                await self._renew(max(ttl_ms / 3000, SHORTEST_INTERVAL_S))
            except grpc.aio.AioRpcError as error:
                if not failing:
                    log.warning("the registry does not have this worker, trying on: %s", error.details())
                failing = True
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY_S)

    async def _register(self, worker: registry_pb2.WorkerInfo) -> int:
        request = registry_pb2.RegisterRequest(worker=worker)
        answer = await self._stub.Register(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True)
        self._lease = answer.lease
        return answer.ttl_ms

    async def _renew(self, interval: float) -> None:
        """Until something changed (returns), or the lease is lost or the registry gone (raises)."""
        while True:
            try:
                async with asyncio.timeout(interval):
                    await self._changed.wait()
                    return
            except TimeoutError:
                request = registry_pb2.RenewRequest(lease=self._lease or 0, load=self._load())
                await self._stub.Renew(request, timeout=CALL_TIMEOUT_S)

    async def _leave(self) -> None:
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        try:
            await self._stub.Deregister(registry_pb2.DeregisterRequest(lease=lease), timeout=LEAVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("could not deregister: %s", error.details())
