"""Leases: who is there, at any moment, whether or not anything has tidied up."""

from __future__ import annotations

import pytest
from baton.v1 import registry_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_gateway.errors import InvalidWorker, LeaseNotFound
from baton_gateway.registry import WorkerRegistry
from fake_decode import worker_info

TTL = 3.0


def _ids(registry: WorkerRegistry, now: float) -> list[str]:
    return sorted(worker.worker_id for worker in registry.workers(now))


def test_a_worker_is_gone_when_its_lease_ends_though_nothing_tidied_up() -> None:
    registry = WorkerRegistry(TTL)
    lease, _ = registry.register(worker_info("a"), 10.0)
    assert _ids(registry, 12.999) == ["a"]
    assert _ids(registry, 13.0) == []
    with pytest.raises(LeaseNotFound):
        registry.renew(lease.lease_id, registry_pb2.WorkerLoad(), 13.0)


def test_renewing_extends_and_reports_the_load() -> None:
    registry = WorkerRegistry(TTL)
    lease, _ = registry.register(worker_info("a"), 0.0)
    registry.renew(lease.lease_id, registry_pb2.WorkerLoad(running_requests=4), 2.0)
    (worker,) = registry.workers(4.9)
    assert worker.load.running_requests == 4
    assert registry.next_expiry() == 5.0


def test_a_second_registration_replaces_the_first() -> None:
    registry = WorkerRegistry(TTL)
    first, nothing = registry.register(worker_info("a", incarnation=1), 0.0)
    second, former = registry.register(worker_info("a", incarnation=2), 1.0)
    assert nothing is None
    assert former is first
    assert [worker.incarnation for worker in registry.workers(1.0)] == [2]
    with pytest.raises(LeaseNotFound):
        registry.renew(first.lease_id, registry_pb2.WorkerLoad(), 1.0)
    registry.renew(second.lease_id, registry_pb2.WorkerLoad(), 1.0)


def test_leaving_is_immediate_and_may_be_said_twice() -> None:
    registry = WorkerRegistry(TTL)
    lease, _ = registry.register(worker_info("a"), 0.0)
    assert registry.deregister(lease.lease_id) is lease
    assert registry.deregister(lease.lease_id) is None
    assert registry.workers(0.0) == []


def test_what_the_caller_does_to_its_message_later_changes_nothing() -> None:
    registry = WorkerRegistry(TTL)
    announced = worker_info("a")
    registry.register(announced, 0.0)
    announced.address = "elsewhere:1"
    assert registry.workers(0.0)[0].address == "127.0.0.1:1"


@pytest.mark.parametrize("field", ["worker_id", "role", "address", "model", "agent"])
def test_a_worker_that_leaves_something_out_is_refused(field: str) -> None:
    worker = worker_info("a", role=registry_pb2.WORKER_ROLE_PREFILL)
    worker.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidWorker, match=field):
        WorkerRegistry(TTL).register(worker, 0.0)


def test_a_worker_of_an_unknown_role_or_at_no_address_is_refused() -> None:
    unknown, nowhere = worker_info("a"), worker_info("a", "nowhere")
    unknown.role = 9  # type: ignore[assignment]
    for worker, problem in ((unknown, "role 9"), (nowhere, "nowhere")):
        registry = WorkerRegistry(TTL)
        with pytest.raises(InvalidWorker, match=problem):
            registry.register(worker, 0.0)
        assert registry.workers(0.0) == []


def test_a_colocated_worker_needs_no_agent() -> None:
    assert not worker_info("a").HasField("agent")
    WorkerRegistry(TTL).register(worker_info("a"), 0.0)


class RegistryMachine(RuleBasedStateMachine):
    """Against a dictionary of expiry times."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = WorkerRegistry(TTL)
        self.now = 0.0
        self.leases: dict[int, str] = {}
        self.current: dict[str, tuple[int, float]] = {}

    @rule(name=st.sampled_from("abc"))
    def register(self, name: str) -> None:
        lease, _ = self.registry.register(worker_info(name), self.now)
        assert lease.lease_id not in self.leases
        self.leases[lease.lease_id] = name
        self.current[name] = (lease.lease_id, self.now + TTL)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        name = self.leases[lease]
        held, expires = self.current.get(name, (0, 0.0))
        if held == lease and expires > self.now:
            self.registry.renew(lease, registry_pb2.WorkerLoad(), self.now)
            self.current[name] = (lease, self.now + TTL)
        else:
            with pytest.raises(LeaseNotFound):
                self.registry.renew(lease, registry_pb2.WorkerLoad(), self.now)

    @rule(data=st.data())
    def deregister(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.registry.deregister(lease)
        if self.current.get(self.leases[lease], (0, 0.0))[0] == lease:
            del self.current[self.leases[lease]]

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.9, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tidy(self) -> None:
        for lease in self.registry.expire(self.now):
            assert lease.expires <= self.now

    @invariant()
    def exactly_the_live_ones_are_seen(self) -> None:
        assert _ids(self.registry, self.now) == sorted(n for n, (_, end) in self.current.items() if end > self.now)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=60, stateful_step_count=30)
