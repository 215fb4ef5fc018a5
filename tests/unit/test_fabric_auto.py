"""Auto: one engine that writes to peers of its host over the local transport, and to others over tcp."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_fabric._native import Engine, InboxFull, TransferDone, TransferFailed
from baton_fabric.errors import FabricError
from fabric_harness import Pair, pair

PREFIX = b"auto:local:baton-"
DIGITS = 32


@pytest.fixture
def both() -> Iterator[Pair]:
    with pair("auto", remote="receiver", post_timeout_ms=500) as both:
        both.sender.fill()
        yield both


def rings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-ring")


def from_another_host(address: bytes) -> bytes:
    """The same endpoint, with a local name that does not exist here."""
    assert address.startswith(PREFIX)
    return PREFIX + secrets.token_hex(DIGITS // 2).encode() + address[len(PREFIX) + DIGITS :]


def connect(both: Pair, *, far: bool) -> None:
    both.sender.engine.disconnect(both.peer)
    both.endpoint, [address] = both.receiver.engine.open_endpoint()
    both.peer = both.sender.engine.connect([from_another_host(address) if far else address])


@pytest.mark.parametrize("far", [False, True], ids=["local", "tcp"])
def test_bytes_move_whichever_way_the_peer_can_be_reached(both: Pair, far: bool) -> None:
    connect(both, far=far)
    assert rings() == (0 if far else 1)
    transfer = both.open([1, 2], [3, 9])
    both.run_step(0)
    both.sender.engine.submit_chunks([(transfer, 0, 0, 2, True)])
    both.sender.wait(TransferDone)
    both.receiver.wait(InboxFull)
    assert (both.receiver.bytes[:, [3, 9]] == both.sender.bytes[:, [1, 2]]).all()
    assert not both.receiver.bytes[:, :3].any()


@pytest.mark.parametrize("far", [False, True], ids=["local", "tcp"])
def test_one_fence_closes_both_ways(both: Pair, far: bool) -> None:
    connect(both, far=far)
    transfer = both.open([1], [3])
    both.run_step(0)
    both.sender.engine.submit_chunks([(transfer, 0, 0, 1, True)])
    both.receiver.wait(InboxFull)
    both.sender.wait(TransferDone)
    both.receiver.bytes[:] = 0
    late = both.open([2], [4])
    both.receiver.engine.close_endpoint(both.endpoint)
    both.sender.engine.submit_chunks([(late, 0, 0, 1, True)])
    both.sender.wait(TransferFailed)
    assert not both.receiver.bytes.any()


def test_one_sender_over_both_ways_at_once(both: Pair) -> None:
    connect(both, far=False)
    endpoint, [address] = both.receiver.engine.open_endpoint()
    far = both.sender.engine.connect([from_another_host(address)])
    both.receiver.engine.open_inbox(endpoint, 99, 0, both.sender.layers)
    both.sender.engine.open_transfer(
        999, far, 99, 0, both.sender.counter, both.sender.layers, [both.stream()], [7], [8]
    )
    near = both.open([1], [2])
    both.run_step(0)
    both.sender.engine.submit_chunks([(999, 0, 0, 1, True), (near, 0, 0, 1, True)])
    both.sender.wait(TransferDone, count=2)
    both.receiver.wait(InboxFull, count=2)
    assert (both.receiver.bytes[:, [8, 2]] == both.sender.bytes[:, [7, 1]]).all()


def test_what_is_no_address_of_both_is_refused(both: Pair) -> None:
    _, [address] = both.receiver.engine.open_endpoint()
    local = address[len(b"auto:") : len(PREFIX) + DIGITS]
    for wrong in (b"", b"auto:", local, b"auto:" + local, address[len(PREFIX) + DIGITS :], PREFIX + b"x" * 200):
        with pytest.raises(FabricError) as caught:
            both.sender.engine.connect([wrong])
        assert caught.value.reason == "BAD_ADDRESS"


def test_with_memory_of_gpus_auto_is_what_libfabric_offers() -> None:
    engine = Engine("auto", device_memory=True)
    try:
        assert "local" not in engine.provider
    finally:
        engine.close()
