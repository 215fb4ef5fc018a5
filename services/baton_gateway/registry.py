"""Who is there: workers under leases. Pure; the caller gives the time.

A worker is as good as gone the moment its lease ends: every look leaves out what has expired by then, whether or not
anything has tidied up since.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import registry_pb2

from baton_gateway.errors import InvalidWorker, LeaseNotFound
from baton_rpc import AddressError, parse_address

WorkerKey = tuple[str, int]
"""Worker id and incarnation."""

_NEEDS_AGENT = (registry_pb2.WORKER_ROLE_PREFILL, registry_pb2.WORKER_ROLE_DECODE)


def worker_key(worker: registry_pb2.WorkerInfo) -> WorkerKey:
    return worker.worker_id, worker.incarnation


@dataclass
class Lease:
    """lease_id: given out once. expires: in seconds of the caller's clock."""

    lease_id: int
    worker: registry_pb2.WorkerInfo
    expires: float

    @property
    def key(self) -> WorkerKey:
        return worker_key(self.worker)


class WorkerRegistry:
    """Leases by id. A worker that registers again replaces its former lease, also that of a former incarnation."""

    def __init__(self, ttl_s: float, new_lease_id: Callable[[], int] = lambda: secrets.randbits(64)) -> None:
        self.ttl_s = ttl_s
        self._new_lease_id = new_lease_id
        self._leases: dict[int, Lease] = {}

    def register(self, worker: registry_pb2.WorkerInfo, now: float) -> tuple[Lease, Lease | None]:
        """The new lease, and the one it replaces, if any. Raises InvalidWorker."""
        _check(worker)
        former = next((old for old in self._leases.values() if old.worker.worker_id == worker.worker_id), None)
        if former is not None:
            del self._leases[former.lease_id]
        kept = registry_pb2.WorkerInfo()
        kept.CopyFrom(worker)
        lease = Lease(self._new_lease_id(), kept, now + self.ttl_s)
        self._leases[lease.lease_id] = lease
        return lease, former

    def renew(self, lease_id: int, load: registry_pb2.WorkerLoad, now: float) -> Lease:
        """Raises LeaseNotFound, also for a lease that has expired but was not tidied up yet."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires <= now:
            raise LeaseNotFound(f"there is no lease {lease_id:#018x}; register again", lease=lease_id)
        lease.worker.load.CopyFrom(load)
        lease.expires = now + self.ttl_s
        return lease

    def deregister(self, lease_id: int) -> Lease | None:
        """Ends the lease; one that is not there any more is no error."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """Takes out what has expired, and returns it."""
        expired = [lease for lease in self._leases.values() if lease.expires <= now]
        for lease in expired:
            del self._leases[lease.lease_id]
        return expired

    def workers(self, now: float) -> list[registry_pb2.WorkerInfo]:
        """Those with a live lease. The messages belong to the registry: read, don't change."""
        return [lease.worker for lease in self._leases.values() if lease.expires > now]

    def next_expiry(self) -> float | None:
        """When the first lease ends unless it is renewed."""
        return min((lease.expires for lease in self._leases.values()), default=None)


def _check(worker: registry_pb2.WorkerInfo) -> None:
    missing = [name for name in ("worker_id", "role", "address") if not getattr(worker, name)]
    if not worker.model.name or not worker.model.fingerprint or not worker.model.max_model_len:
        missing.append("model (name, fingerprint, max_model_len)")
    if worker.role in _NEEDS_AGENT and not worker.HasField("agent"):
        missing.append("agent")
    if missing:
        raise InvalidWorker(
            f"worker {worker.worker_id!r} announced itself without {', '.join(missing)}",
            worker=worker.worker_id,
            missing=",".join(missing),
        )
    if worker.role not in registry_pb2.WorkerRole.values():
        raise InvalidWorker(f"worker {worker.worker_id!r} has the unknown role {worker.role}", worker=worker.worker_id)
    try:
        parse_address(worker.address)
    except AddressError as error:
        raise InvalidWorker(f"worker {worker.worker_id!r}: {error}", worker=worker.worker_id) from error
