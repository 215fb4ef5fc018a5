"""The live cluster as this gateway sees it: leases, loads and channels, in one place of one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import grpc
from baton.v1 import registry_pb2

from baton_gateway.load import LoadBook
from baton_gateway.registry import Lease, WorkerKey, WorkerRegistry, worker_key
from baton_gateway.routing import COLOCATED, DECODE, PREFILL, Candidate
from baton_rpc import open_channel
from baton_telemetry import GatewayMetrics

logger = logging.getLogger(__name__)

ROLE_NAMES = {PREFILL: "prefill", DECODE: "decode", COLOCATED: "colocated"}


class Cluster:
    """Owns the registry. `start` begins to tidy up expired leases; nothing else depends on that having happened."""

    def __init__(
        self, ttl_s: float, metrics: GatewayMetrics, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._registry = WorkerRegistry(ttl_s)
        self._metrics = metrics
        self._credentials = credentials
        self.loads = LoadBook()
        self._channels: dict[WorkerKey, _Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None
        for role, name in ROLE_NAMES.items():
            metrics.workers.labels(role=name).set_function(partial(self._count, role))

    async def start(self) -> None:
        self._reaper = asyncio.create_task(self._reap(), name="lease reaper")

    async def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        for key in list(self._channels):
            self._retire(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def join(self) -> None:
        """Until `stop`; raises what the tidying failed of."""
        if self._reaper is not None:
            await asyncio.shield(self._reaper)

    # --- leases -------------------------------------------------------------------------------------------------------

    def register(self, worker: registry_pb2.WorkerInfo) -> tuple[int, int]:
        """Lease and its time to live in milliseconds. Raises InvalidWorker."""
        lease, former = self._registry.register(worker, time.monotonic())
        self.loads.reported(lease.key)
        if former is not None and former.key != lease.key:
            self._left(former)
        logger.info("worker %s registered: %s at %s", *_named(lease))
        self._notify()
        return lease.lease_id, int(self._registry.ttl_s * 1000)

    def renew(self, lease_id: int, load: registry_pb2.WorkerLoad) -> None:
        """Raises LeaseNotFound."""
        lease = self._registry.renew(lease_id, load, time.monotonic())
        self.loads.reported(lease.key)

    def deregister(self, lease_id: int) -> None:
        lease = self._registry.deregister(lease_id)
        if lease is not None:
            logger.info("worker %s left: %s at %s", *_named(lease))
            self._left(lease)
            self._notify()

    def workers(self) -> list[registry_pb2.WorkerInfo]:
        return self._registry.workers(time.monotonic())

    def candidates(self) -> list[Candidate]:
        return self.loads.candidates(self.workers())

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of who is there. Take it before looking, wait for it after."""
        return self._changed

    # --- channels -----------------------------------------------------------------------------------------------------

    @contextmanager
    def channel(self, worker: registry_pb2.WorkerInfo) -> Iterator[grpc.aio.Channel]:
        """A channel to this incarnation of the worker, kept open while it is registered or in use.

        A worker that lost its lease may only be slow: what it still serves is left to end by itself.
        """
        key = worker_key(worker)
        shared = self._channels.get(key)
        if shared is None or shared.address != worker.address:
            if shared is not None:
                self._retire(key)
            shared = self._channels[key] = _Channel(worker.address, open_channel(worker.address, self._credentials))
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            self._close_if_unused(shared)

    def _retire(self, key: WorkerKey) -> None:
        shared = self._channels.pop(key, None)
        if shared is not None:
            shared.retired = True
            self._close_if_unused(shared)

    def _close_if_unused(self, shared: _Channel) -> None:
        if shared.retired and shared.users == 0:
            task = asyncio.create_task(shared.channel.close(), name=f"close channel to {shared.address}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # --- tidying ------------------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        while True:
            changed = self._changed
            expiry = self._registry.next_expiry()
            try:
                async with asyncio.timeout(None if expiry is None else max(0.0, expiry - time.monotonic())):
                    await changed.wait()
            except TimeoutError:
                self._expire()

    def _expire(self) -> None:
        expired = self._registry.expire(time.monotonic())
        for lease in expired:
            logger.warning("worker %s fell silent: %s at %s", *_named(lease))
            self._metrics.leases_expired.labels(role=ROLE_NAMES[lease.worker.role]).inc()
            self._left(lease)
        if expired:
            self._notify()

    def _left(self, lease: Lease) -> None:
        self._retire(lease.key)
        self.loads.forget(lease.key)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _count(self, role: registry_pb2.WorkerRole.ValueType) -> int:
        return sum(worker.role == role for worker in self.workers())


class _Channel:
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.users = 0
        self.retired = False


def _named(lease: Lease) -> tuple[str, str, str]:
    worker, sharding = lease.worker, lease.worker.sharding
    role = ROLE_NAMES.get(worker.role, str(worker.role))
    ranks = [
        f"{count} x {name}"
        for name, count in (("tensor-parallel", sharding.tensor_parallel), ("data-parallel", sharding.data_parallel))
        if count > 1
    ]
    return worker.worker_id, ", ".join((role, *ranks)), worker.address
