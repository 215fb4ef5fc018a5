"""What the engine refuses, and what it ignores because a race makes it legal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton_fabric._native import Engine, TransferDone, libfabric_version
from baton_fabric.errors import FabricError
from baton_memory import SharedMemory
from fabric_harness import Pair, pair


@pytest.fixture(scope="module")
def both() -> Iterator[Pair]:
    with pair("tcp") as both:
        yield both


def refused(status: str, reason: str, call: Callable[..., Any], *arguments: Any) -> FabricError:
    with pytest.raises(FabricError) as caught:
        call(*arguments)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert str(caught.value)
    return caught.value


def test_an_unknown_provider_is_refused() -> None:
    error = refused("UNAVAILABLE", "PROVIDER_UNAVAILABLE", Engine, "no-such-provider")
    assert error.fields["provider"] == "no-such-provider"


def test_a_node_that_is_not_ours_is_refused() -> None:
    refused("UNAVAILABLE", "PROVIDER_UNAVAILABLE", Engine, "tcp", ["203.0.113.1"])


def test_auto_is_the_best_provider_over_tcp_and_local() -> None:
    engine = Engine()
    try:
        capabilities = engine.capabilities()[0]
        version = libfabric_version()
        expected = "tcp" if version >= (2, 0) else "net" if version >= (1, 17) else "tcp;ofi_rxm"
        assert engine.provider == capabilities["provider"] == f"{expected}+local"
        assert capabilities["cq_data_size"] >= 4
        assert capabilities["wait_fd"] is capabilities["ordered"] is True
        assert 1 <= capabilities["window"] <= capabilities["tx_size"]
    finally:
        engine.close()


def test_a_region_must_lie_within_its_file(both: Pair) -> None:
    memory = SharedMemory.create("small", 4096)
    engine = both.sender.engine
    try:
        error = refused("INVALID_ARGUMENT", "BAD_REGION", engine.register_region, memory.fd, 4097)
        assert error.fields == {"length": "4097", "file": "4096"}
        refused("INVALID_ARGUMENT", "BAD_REGION", engine.register_region, memory.fd, 0)
    finally:
        memory.close()
    read, write = os.pipe()
    try:
        refused("INVALID_ARGUMENT", "BAD_REGION", engine.register_region, read, 4096)
    finally:
        os.close(read)
        os.close(write)


def test_the_engine_keeps_its_own_descriptors(both: Pair) -> None:
    memory = SharedMemory.create("closed early", 4096)
    region, _ = both.sender.engine.register_region(memory.fd, memory.length)
    memory.close()
    both.sender.engine.deregister_region(region)


def test_a_counter_is_memory_and_an_eventfd(both: Pair) -> None:
    engine = both.sender.engine
    counter = both.sender.layer_counter
    refused("INVALID_ARGUMENT", "BAD_COUNTER", engine.attach_counter, counter.memory_fd, counter.memory_fd)
    refused("INVALID_ARGUMENT", "BAD_COUNTER", engine.attach_counter, counter.doorbell_fd, counter.doorbell_fd)


@pytest.mark.parametrize(
    ("method", "arguments", "reason"),
    [
        ("deregister_region", (999,), "UNKNOWN_REGION"),
        ("detach_counter", (999,), "UNKNOWN_COUNTER"),
        ("close_endpoint", (999,), "UNKNOWN_ENDPOINT"),
        ("open_inbox", (999, 0, 0, 1), "UNKNOWN_ENDPOINT"),
        ("open_transfer", (1, 999, 0, 0, 1, 1, [], [], []), "UNKNOWN_PEER"),
        ("open_transfer", (1, 1, 0, 0, 999, 1, [], [], []), "UNKNOWN_COUNTER"),
        (
            "open_transfer",
            (1, 1, 0, 0, 1, 1, [(999, 0, 0, [(0, 0, 0)], 0, 0, 0, [(0, 0, 1)])], [0], [0]),
            "UNKNOWN_REGION",
        ),
    ],
)
def test_unknown_handles_are_refused(both: Pair, method: str, arguments: tuple[Any, ...], reason: str) -> None:
    refused("NOT_FOUND", reason, getattr(both.sender.engine, method), *arguments)


def test_stale_handles_that_a_race_makes_legal_are_ignored(both: Pair) -> None:
    engine = both.sender.engine
    engine.cancel_transfer(12345)
    engine.disconnect(12345)
    engine.submit_chunks([(12345, 0, 0, 1, True)])
    assert both.receiver.engine.close_inbox(4000, 0) is False
    assert both.receiver.engine.close_inbox(999_999, 0) is False


def test_an_address_that_is_none_is_refused(both: Pair) -> None:
    refused("INVALID_ARGUMENT", "BAD_ADDRESS", both.sender.engine.connect, [b""])
    refused("INVALID_ARGUMENT", "BAD_ADDRESS", both.sender.engine.connect, [b"short"])
    refused("INVALID_ARGUMENT", "BAD_ADDRESS", both.sender.engine.connect, [b"x" * 200])


def test_shm_within_one_process_is_refused() -> None:
    engine = Engine("shm")
    try:
        _, [address] = engine.open_endpoint()
        refused("INVALID_ARGUMENT", "BAD_ADDRESS", engine.connect, [address])
    finally:
        engine.close()


def test_slots_and_generations_have_their_ranges(both: Pair) -> None:
    engine = both.receiver.engine
    refused("INVALID_ARGUMENT", "BAD_ARGUMENT", engine.open_inbox, both.endpoint, 4096, 0, 1)
    refused("INVALID_ARGUMENT", "BAD_ARGUMENT", engine.open_inbox, both.endpoint, 0, 1 << 32, 1)
    refused("INVALID_ARGUMENT", "BAD_ARGUMENT", both.sender.engine.open_transfer, 1, 1, 4096, 0, 1, 1, [], [], [])


def test_a_slot_has_one_inbox_at_a_time(both: Pair) -> None:
    engine = both.receiver.engine
    engine.open_inbox(both.endpoint, 50, 1, 1)
    refused("ALREADY_EXISTS", "SLOT_IN_USE", engine.open_inbox, both.endpoint, 50, 2, 1)
    assert engine.close_inbox(50, 2) is False  # another generation: left alone
    refused("ALREADY_EXISTS", "SLOT_IN_USE", engine.open_inbox, both.endpoint, 50, 2, 1)
    assert engine.close_inbox(50, 1) is False
    engine.open_inbox(both.endpoint, 50, 2, 1)
    engine.close_inbox(50, 2)


def test_a_transfer_id_is_used_by_one_transfer_at_a_time(both: Pair) -> None:
    transfer = both.open([0], [0])
    refused("ALREADY_EXISTS", "TRANSFER_EXISTS", both.sender.engine.open_transfer, *_open(both, transfer))
    both.sender.engine.cancel_transfer(transfer)


def _open(both: Pair, transfer: int, **changes: Any) -> list[Any]:
    arguments = {
        "transfer": transfer,
        "peer": both.peer,
        "slot": 9,
        "generation": 0,
        "counter": both.sender.counter,
        "layers": both.sender.layers,
        "streams": [both.stream()],
        "source_pages": [0],
        "destination_pages": [0],
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": 0}, "BAD_ARGUMENT"),
        ({"layers": 5}, "OUT_OF_BOUNDS"),
        ({"layers": 2**63}, "OUT_OF_BOUNDS"),
        ({"source_pages": [0, 1]}, "BAD_ARGUMENT"),
        ({"source_pages": [64]}, "OUT_OF_BOUNDS"),
        ({"destination_pages": [64]}, "OUT_OF_BOUNDS"),
        ({"source_pages": [2**32 - 1]}, "OUT_OF_BOUNDS"),
        ({"extents": [(0, 0, 0)]}, "BAD_ARGUMENT"),
        ({"extents": [(0, 0, 4097)], "source_pages": [63]}, "OUT_OF_BOUNDS"),
        ({"extents": [(1, 0, 4096)], "source_pages": [63]}, "OUT_OF_BOUNDS"),
        ({"extents": [(0, 1, 4096)], "destination_pages": [63]}, "OUT_OF_BOUNDS"),
        ({"extents": [(2**64 - 1, 0, 1)]}, "OUT_OF_BOUNDS"),
        ({"extents": [(0, 2**64 - 4096, 4096)]}, "OUT_OF_BOUNDS"),
    ],
)
def test_nothing_outside_the_regions_can_be_named(both: Pair, changes: dict[str, Any], reason: str) -> None:
    changes = dict(changes)
    if "extents" in changes:
        changes["streams"] = [both.stream(*changes.pop("extents"))]
    refused("INVALID_ARGUMENT", reason, both.sender.engine.open_transfer, *_open(both, 700, **changes))
    assert both.sender.metric("transfers") == 0


def test_strides_that_leave_the_remote_region_are_refused(both: Pair) -> None:
    region, layer, page, remotes, length, *_ = both.stream()
    # The product of these alone is just below 2^128: their sum must not wrap around to something small.
    wrapping = (region, 2**64 - 1, 2**64 - 1, remotes, length, 2**64 - 1, 2**64 - 1, [(0, 0, 4096)])
    call = _open(both, 701, streams=[wrapping], layers=2**64 - 1, source_pages=[2**32 - 1])
    refused("INVALID_ARGUMENT", "OUT_OF_BOUNDS", both.sender.engine.open_transfer, *call)
    for remote in [(length, 4096), (4096, 2**63), (2**64 - 1, 2**64 - 1)]:
        stream = (region, layer, page, remotes, length, *remote, [(0, 0, 4096)])
        call = _open(both, 701, streams=[stream], destination_pages=[1])
        refused("INVALID_ARGUMENT", "OUT_OF_BOUNDS", both.sender.engine.open_transfer, *call)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(1, 1, False)], "CHUNK_OUT_OF_ORDER"),
        ([(0, 2, False), (0, 1, False)], "CHUNK_OUT_OF_ORDER"),
        ([(0, 2, False), (3, 1, False)], "CHUNK_OUT_OF_ORDER"),
        ([(0, 4, True), (4, 0, True)], "CHUNK_OUT_OF_ORDER"),
        ([(0, 5, False)], "CHUNK_TOO_LONG"),
        ([(0, 2**63, False)], "CHUNK_TOO_LONG"),
        ([(0, 3, True)], "LAST_CHUNK_SHORT"),
        ([(0, 0, True)], "LAST_CHUNK_SHORT"),
    ],
)
def test_of_a_call_with_a_bad_plan_nothing_is_taken(
    both: Pair, chunks: list[tuple[int, int, bool]], reason: str
) -> None:
    transfer, bystander = both.open([0, 1, 2, 3], [0, 1, 2, 3]), both.open([5], [5])
    base = both.sender.layer_counter.value()
    plans = [(bystander, base, 0, 1, True), *[(transfer, base, *chunk) for chunk in chunks]]
    refused("INVALID_ARGUMENT", reason, both.sender.engine.submit_chunks, plans)
    # Neither has a plan: both can still be planned from the beginning.
    both.sender.engine.submit_chunks([(transfer, base, 0, 4, True), (bystander, base, 0, 1, True)])
    both.run_step(base // both.sender.layers)
    assert len(both.sender.wait(TransferDone, count=2)) == 2


def test_counters_in_use_stay(both: Pair) -> None:
    engine = both.sender.engine
    transfer = both.open([0], [0])
    refused("FAILED_PRECONDITION", "COUNTER_IN_USE", engine.detach_counter, both.sender.counter)
    engine.cancel_transfer(transfer)
    other = engine.attach_counter(both.sender.layer_counter.memory_fd, both.sender.layer_counter.doorbell_fd)
    engine.detach_counter(other)
    refused("NOT_FOUND", "UNKNOWN_COUNTER", engine.detach_counter, other)


def test_a_closed_engine_says_so_and_closing_again_is_nothing() -> None:
    engine = Engine("tcp")
    engine.close()
    engine.close()
    refused("FAILED_PRECONDITION", "ENGINE_CLOSED", engine.open_endpoint)
    refused("FAILED_PRECONDITION", "ENGINE_CLOSED", engine.submit_chunks, [])
    assert engine.events() == []
    assert engine.metrics()["busy_us"] == 0
    assert engine.provider


def test_wrong_types_are_type_errors(both: Pair) -> None:
    with pytest.raises(TypeError):
        both.sender.engine.submit_chunks([(1, 2, 3)])
    with pytest.raises(TypeError):
        both.sender.engine.open_inbox(both.endpoint, -1, 0, 1)
