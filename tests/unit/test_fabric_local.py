"""The local transport: what its sides do not believe of each other, and what a give-up means where the other copies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from baton_fabric._native import Engine, InboxFull, PeerFailed, TransferDone, TransferFailed
from baton_fabric.errors import FabricError
from baton_kv.immediate import encode
from descriptors import open_descriptors
from fabric_harness import Pair, pair, wait_until
from local_wire import (
    CLOSED,
    ENTRIES,
    FORGET,
    HEAD,
    HELLO,
    LENGTH,
    NEVER,
    REGION,
    SHRINK,
    TAIL,
    WAKE,
    WAKE_SENDER_AT,
    Receiver,
    Sender,
    memory,
    message,
)

MIB = 1 << 20
# Of one endpoint: twice as many as an agent may have domains.
MOST_CONNECTIONS = 128


@pytest.fixture
def both() -> Iterator[Pair]:
    with pair("local") as both:
        both.sender.fill()
        yield both


@pytest.fixture
def sender(both: Pair) -> Iterator[Sender]:
    """By hand, to an endpoint of its own."""
    both.endpoint, [address] = both.receiver.engine.open_endpoint()
    with Sender(address) as sender:
        yield sender


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def serves(both: Pair) -> None:
    """The receiver is as good as new."""
    both.connect()
    both.receiver.bytes[:] = 0
    step = both.sender.layer_counter.value() // both.sender.layers
    transfer = both.open([3], [5], generation=both.next_slot())
    both.sender.engine.submit_chunks([(transfer, step * both.sender.layers, 0, 1, True)])
    both.run_step(step)
    both.receiver.wait(InboxFull)
    expected = np.zeros_like(both.receiver.bytes)
    expected[:, 5] = both.sender.bytes[:, 3]
    assert (both.receiver.bytes == expected).all()


def test_what_a_sender_asks_for_is_copied_counted_and_confirmed(both: Pair, sender: Sender) -> None:
    both.receiver.engine.open_inbox(both.endpoint, 7, 0, 3)
    sender.hello()
    sender.region(1, b"abcdefgh")
    sender.region(9, b"ABCDEFGH")
    sender.write(1, 2, both.receiver.key, 10, 4, encode(7, 0, 1))
    sender.write(9, 0, both.receiver.key, 4, 8, encode(7, 0, 2))
    (full,) = both.receiver.wait(InboxFull)
    assert (full.slot, full.extents) == (7, 3)
    assert bytes(both.receiver.bytes[0, 0, :16]) == b"\0\0\0\0ABCDEFGHef\0\0"
    wait_until(lambda: sender.ring.word(TAIL) == 2, "both are confirmed")


def test_a_sender_that_sleeps_is_woken_where_it_wants_to_be(both: Pair, sender: Sender) -> None:
    sender.hello()
    sender.region(1, bytes(64))
    sender.ring.set_word(WAKE_SENDER_AT, 2)
    sender.write(1, 0, both.receiver.key, 0, 8, encode(7, 0, 1))
    wait_until(lambda: sender.ring.word(TAIL) == 1, "the first is confirmed")
    assert sender.ring.word(WAKE_SENDER_AT) == 2
    sender.write(1, 0, both.receiver.key, 0, 8, encode(7, 0, 1))
    assert sender.socket.recv(64) == message(WAKE)
    assert (sender.ring.word(TAIL), sender.ring.word(WAKE_SENDER_AT)) == (2, NEVER)


@pytest.mark.parametrize(
    "change",
    [
        {"region": 2},
        {"region": NEVER},
        {"source": 57},
        {"source": NEVER},
        {"source": NEVER - 7},
        {"key": 0},
        {"destination": 4 * 64 * 4096 - 7},
        {"destination": NEVER - 7},
        {"length": 0},
        {"length": 65},
        {"length": NEVER},
    ],
    ids=lambda change: "-".join(f"{name}={value:#x}" for name, value in change.items()),
)
def test_an_entry_outside_a_region_ends_the_connection_and_nothing_else(
    both: Pair, sender: Sender, change: dict[str, int]
) -> None:
    sender.hello()
    sender.region(1, b"x" * 64)
    entry = {"region": 1, "source": 0, "key": both.receiver.key, "destination": 0, "length": 8}
    sender.write(**(entry | change), immediate=encode(7, 0, 1))
    assert sender.dropped()
    wait_until(lambda: both.receiver.metric("receive_errors") == 1, "it is counted")
    assert not both.receiver.bytes.any()
    assert both.receiver.metric("immediates") == 0
    serves(both)


@pytest.mark.parametrize("head", [ENTRIES + 1, 1 << 40, CLOSED, NEVER])
def test_more_entries_than_a_ring_has_end_the_connection(both: Pair, sender: Sender, head: int) -> None:
    sender.hello()
    sender.ring.set_word(HEAD, head)
    sender.wake()
    assert sender.dropped()
    wait_until(lambda: both.receiver.metric("receive_errors") == 1, "it is counted")
    serves(both)


def test_a_tail_that_the_sender_moves_ends_the_connection(both: Pair, sender: Sender) -> None:
    sender.hello()
    sender.region(1, bytes(64))
    sender.ring.set_word(TAIL, 5)
    sender.write(1, 0, both.receiver.key, 0, 8, encode(7, 0, 1))
    assert sender.dropped()
    assert both.receiver.metric("immediates") == 0
    serves(both)


def unsealed(length: int) -> int:
    return memory(length, 0)


def pipe(_length: int) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


@pytest.mark.parametrize(
    "make",
    [unsealed, pipe, lambda length: memory(length - 1)],
    ids=["may shrink", "a pipe", "too short"],
)
@pytest.mark.parametrize("kind", [HELLO, REGION], ids=["ring", "region"])
def test_memory_that_could_vanish_is_not_touched(
    both: Pair, sender: Sender, kind: int, make: Callable[[int], int]
) -> None:
    if kind == REGION:
        sender.hello()
    fd = make(LENGTH)
    try:
        sender.send(message(kind, 1, LENGTH), fd)
        assert sender.dropped()
    finally:
        os.close(fd)
    wait_until(lambda: both.receiver.metric("receive_errors") == 1, "it is counted")
    serves(both)


@pytest.mark.parametrize(
    "messages",
    [
        [message(WAKE)],
        [message(FORGET, 1)],
        [message(REGION, 1, 64)],
        [message(HELLO)],
        [message(HELLO, magic=1)],
        [b"?"],
        [message(HELLO) + b"more"],
        [b"x" * 4096],
    ],
)
def test_a_connection_begins_with_a_ring(both: Pair, sender: Sender, messages: list[bytes]) -> None:
    for each in messages:
        sender.send(each)
    assert sender.dropped()
    serves(both)


@pytest.mark.parametrize("again", [HELLO, REGION, 77])
def test_nothing_is_said_twice(both: Pair, sender: Sender, again: int) -> None:
    sender.hello()
    sender.region(1, bytes(LENGTH))
    sender.send(message(again, 1, LENGTH), sender.ring.fd)
    assert sender.dropped()
    serves(both)


def test_a_region_without_length_is_refused(both: Pair, sender: Sender) -> None:
    sender.hello()
    sender.send(message(REGION, 1, 0), sender.ring.fd)
    assert sender.dropped()
    serves(both)


def test_a_forgotten_region_can_not_be_named_any_more(both: Pair, sender: Sender) -> None:
    sender.hello()
    sender.region(1, b"x" * 64)
    sender.send(message(FORGET, 1))
    sender.write(1, 0, both.receiver.key, 0, 8, encode(7, 0, 1))
    assert sender.dropped()
    assert not both.receiver.bytes.any()


def test_an_endpoint_takes_some_connections_and_not_any_number(both: Pair) -> None:
    _, [address] = both.receiver.engine.open_endpoint()
    senders = [Sender(address) for _ in range(MOST_CONNECTIONS + 1)]
    for sender in senders[:MOST_CONNECTIONS]:
        sender.hello()
    assert senders[MOST_CONNECTIONS].dropped()
    for sender in senders:
        sender.__exit__()
    with Sender(address) as late:
        late.hello()
        late.region(1, b"late" * 2)
        late.write(1, 0, both.receiver.key, 0, 8, encode(7, 0, 1))
        wait_until(lambda: bytes(both.receiver.bytes[0, 0, :8]) == b"late" * 2, "there is room again")


@pytest.mark.parametrize("length", [8, 3 * MIB], ids=["in the ring", "under way"])
def test_what_is_asked_for_by_a_sender_that_has_closed_is_never_counted(length: int) -> None:
    """Its source pages may be somebody else's by then."""
    with pair("local", layers=4, pages=4, page_bytes=MIB) as both:
        both.endpoint, [address] = both.receiver.engine.open_endpoint()
        with Sender(address) as sender:
            both.receiver.engine.open_inbox(both.endpoint, 7, 0, 1)
            sender.hello()
            sender.region(1, b"x" * length)
            if length == 8:  # before: the receiver may look at any time
                sender.ring.set_word(TAIL, CLOSED)
            sender.ring.put(1, 0, both.receiver.key, 0, length, encode(7, 0, 1))
            if length == 8:
                sender.wake()
            else:
                sender.wake()
                wait_until(lambda: bool(both.receiver.bytes[0, 0, 0]) or sender.ring.word(TAIL) == 1, "it begins")
            taken = sender.ring.word(TAIL) == 1
        both.receiver.engine.close_endpoint(both.endpoint)
        assert both.receiver.metric("immediates") <= (1 if taken or length != 8 else 0)
        if length == 8:
            assert not both.receiver.bytes.any()


@pytest.mark.parametrize("tail", [1, ENTRIES + 1, CLOSED, NEVER])
def test_a_receiver_that_confirms_what_it_was_not_asked_for_has_failed(
    both: Pair, receiver: Receiver, tail: int
) -> None:
    peer = both.sender.engine.connect([receiver.address])
    receiver.accept()
    receiver.ring.set_word(TAIL, tail)
    receiver.socket.send(message(WAKE))
    (failed,) = both.sender.wait(PeerFailed)
    assert (failed.peer, failed.reason) == (peer, "PEER_EXITED")
    serves(both)


def test_a_receiver_sees_a_region_before_the_entry_that_names_it_and_loses_it_with_its_registration(
    both: Pair, receiver: Receiver
) -> None:
    engine = both.sender.engine
    peer = engine.connect([receiver.address])
    receiver.accept()
    engine.open_transfer(5, peer, 3, 0, both.sender.counter, both.sender.layers, [both.stream()], [1], [2])
    engine.submit_chunks([(5, 0, 0, 1, True)])
    both.run_step(0)
    wait_until(lambda: receiver.ring.word(HEAD) == both.sender.layers, "all layers are asked for")
    kind, region, length, fds = receiver.receive()
    assert (kind, length, len(fds)) == (REGION, both.sender.memory.length, 1)
    assert os.fstat(fds[0]).st_ino == os.fstat(both.sender.memory.fd).st_ino
    os.close(fds[0])
    for layer in range(both.sender.layers):
        page = both.sender.page_bytes
        offsets = [(layer * both.sender.pages + number) * page for number in (1, 2)]
        expected = (region, offsets[0], both.receiver.key, offsets[1], page, encode(3, 0, 1))
        assert receiver.ring.entry(layer) == expected
    receiver.ring.set_word(TAIL, both.sender.layers)
    if receiver.ring.word(WAKE_SENDER_AT) != NEVER:
        receiver.socket.send(message(WAKE))
    both.sender.wait(TransferDone)
    engine.deregister_region(both.sender.region)
    assert receiver.receive()[:2] == (FORGET, region)


def test_a_sender_that_disconnects_closes_the_ring_before_it_says_so(both: Pair, receiver: Receiver) -> None:
    engine = both.sender.engine
    peer = engine.connect([receiver.address])
    receiver.accept()
    engine.open_transfer(5, peer, 3, 0, both.sender.counter, both.sender.layers, [both.stream()], [1], [2])
    engine.submit_chunks([(5, 0, 0, 1, True)])
    both.run_step(0)
    wait_until(lambda: receiver.ring.word(HEAD) == both.sender.layers, "all layers are asked for")
    engine.disconnect(peer)
    (failed,) = both.sender.wait(TransferFailed)
    assert not failed.quiesced
    assert receiver.ring.word(TAIL) == CLOSED


def test_a_receiver_that_stood_still_counts_nothing_of_a_sender_that_has_given_up() -> None:
    """The engine that sent may have written other things into its pages."""
    with pair("local", remote="receiver", layers=2, pages=64, page_bytes=MIB, post_timeout_ms=300) as both:
        both.sender.fill()
        both.sender.bytes[0, :8] = 7  # the first layer takes more than one turn
        pages = list(range(64))
        transfer = both.open(pages, pages)
        both.receiver.signal(signal.SIGSTOP)
        both.run_step(0)
        both.sender.engine.submit_chunks([(transfer, 0, 0, 64, True)])
        (failed,) = both.sender.wait(TransferFailed)
        assert failed.reason == "WRITE_TIMEOUT"
        both.sender.bytes[:] = 0xEE
        both.receiver.signal(signal.SIGCONT)
        after = both.receiver.engine.metrics()
        assert both.receiver.engine.close_endpoint(both.endpoint) == [[1, 0]]
        assert (after["extents_received"], after["inboxes_full"]) == (0, 0)
        assert both.receiver.metric("extents_received") == 0
        assert not both.receiver.bytes.any()


def test_nobody_at_the_address_is_told_at_once(both: Pair) -> None:
    _, [address] = both.receiver.engine.open_endpoint()
    gone = address[:-1] + (b"0" if address[-1:] != b"0" else b"1")
    peer = both.sender.engine.connect([gone])
    (failed,) = both.sender.wait(PeerFailed)
    assert (failed.peer, failed.reason) == (peer, "PEER_EXITED")
    with pytest.raises(FabricError) as caught:
        both.sender.engine.connect([address + b"0"])
    assert caught.value.reason == "BAD_ADDRESS"


def test_an_idle_peer_that_closes_is_noticed(both: Pair) -> None:
    both.receiver.engine.close_endpoint(both.endpoint)
    (failed,) = both.sender.wait(PeerFailed)
    assert (failed.peer, failed.reason) == (both.peer, "PEER_EXITED")


def test_one_engine_can_send_to_itself() -> None:
    with pair("local") as both:
        both.sender.fill()
        engine = both.sender.engine
        region, [(_, key, base)] = engine.register_region(both.receiver.memory.fd, both.receiver.memory.length)
        assert region != both.sender.region
        endpoint, [address] = engine.open_endpoint()
        engine.open_inbox(endpoint, 1, 0, 4)
        peer = engine.connect([address])
        stream = list(both.stream())
        stream[3] = [(0, key, base)]
        engine.open_transfer(1, peer, 1, 0, both.sender.counter, 4, [tuple(stream)], [6], [8])
        engine.submit_chunks([(1, 0, 0, 1, True)])
        both.run_step(0)
        both.sender.wait(InboxFull)
        both.sender.wait(TransferDone)
        assert (both.receiver.bytes[:, 8] == both.sender.bytes[:, 6]).all()


def test_what_a_receiver_did_before_it_closed_is_done(both: Pair, receiver: Receiver) -> None:
    """Its last confirmation and its end are seen together."""
    engine = both.sender.engine
    peer = engine.connect([receiver.address])
    receiver.accept()
    for transfer, page in ((5, 1), (6, 2)):
        engine.open_transfer(transfer, peer, 3, 0, both.sender.counter, 4, [both.stream()], [page], [page])
    engine.submit_chunks([(5, 0, 0, 1, True), (6, 0, 0, 1, True)])
    both.run_step(0)
    wait_until(lambda: receiver.ring.word(HEAD) == 8, "all layers of both are asked for")
    receiver.ring.set_word(TAIL, 7)
    receiver.socket.close()
    (failed,) = both.sender.wait(TransferFailed)
    both.sender.wait(TransferDone)
    assert not failed.quiesced
    assert both.sender.metric("delivery_completions") == 7


def test_connections_and_endpoints_leave_nothing_behind(both: Pair) -> None:
    def once() -> None:
        both.receiver.engine.close_endpoint(both.endpoint)
        both.sender.wait(PeerFailed)
        both.sender.engine.disconnect(both.peer)
        serves(both)
        both.sender.wait(TransferDone)

    once()
    before = open_descriptors()
    for _ in range(100):
        once()
    assert open_descriptors() == before
    assert Path("/proc/self/maps").read_text().count("memfd:baton-ring") == 2


def test_local_needs_no_libfabric_and_has_one_name() -> None:
    engine = Engine("local", ["203.0.113.1"])  # the node means nothing to it
    try:
        capabilities = engine.capabilities()[0]
        assert engine.provider == capabilities["provider"] == "local"
        assert capabilities["wait_fd"] is capabilities["ordered"] is True
        assert capabilities["device_memory"] is False
        _, [address] = engine.open_endpoint()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(b"\0" + address.removeprefix(b"local:"))
    finally:
        engine.close()


def test_memory_that_cannot_be_sealed_is_not_registered(both: Pair) -> None:
    fd = os.memfd_create("sealed otherwise", os.MFD_CLOEXEC)  # forbids seals
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(FabricError) as caught:
            both.sender.engine.register_region(fd, 4096)
        assert caught.value.reason == "BAD_REGION"
    finally:
        os.close(fd)
    fd = memory(4096, SHRINK)
    region, _ = both.sender.engine.register_region(fd, 4096)
    os.close(fd)
    both.sender.engine.deregister_region(region)
