"""Engines of several domains: tcp on addresses of 127.0.0.0/8, more or fewer than the other side has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from math import gcd
from operator import gt
from typing import Any

import numpy as np
import pytest

from baton_fabric._native import (
    Engine,
    InboxFull,
    PeerFailed,
    TransferCancelled,
    TransferDone,
    TransferFailed,
)
from baton_fabric.errors import FabricError
from baton_fabric.faults import FaultRule
from fabric_harness import LARGE_PAGE, Pair, make_side, pair, wait_until

LAYERS = 4
COUNTS = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1)]


def addresses(first: int, count: int) -> list[str]:
    return [f"127.0.0.{first + number}" for number in range(count)]


def domains(ours: int, theirs: int) -> tuple[list[str], list[str]]:
    return addresses(2, ours), addresses(12, theirs)


@pytest.fixture(params=COUNTS, ids=lambda counts: f"{counts[0]} to {counts[1]}")
def both(request: pytest.FixtureRequest) -> Iterator[Any]:
    # Pages as large as what is not divided further.
    with pair("tcp", domains=domains(*request.param), layers=LAYERS, page_bytes=128 << 10) as both:
        both.sender.fill()
        yield both


@pytest.fixture
def two() -> Iterator[Any]:
    with pair("tcp", domains=domains(2, 2), layers=LAYERS, page_bytes=128 << 10) as two:
        two.sender.fill()
        yield two


@pytest.fixture
def impatient() -> Iterator[Any]:
    """Two against two that wait for a second at most."""
    with pair("tcp", domains=domains(2, 2), layers=LAYERS, page_bytes=128 << 10, post_timeout_ms=1000) as two:
        two.sender.fill()
        yield two


@pytest.fixture
def large() -> Iterator[Any]:
    """Whose transfers are still under way when something happens to them."""
    shape = {"layers": 1, "pages": 64, "page_bytes": LARGE_PAGE}
    with pair("tcp", remote="receiver", domains=domains(2, 2), post_timeout_ms=1000, **shape) as large:
        large.sender.fill()
        yield large


def send(both: Pair, source: list[int], destination: list[int], **arguments: Any) -> int:
    transfer = both.open(source, destination, **arguments)
    step = both.sender.layer_counter.value() // both.sender.layers
    both.sender.engine.submit_chunks([(transfer, step * both.sender.layers, 0, len(source), True)])
    both.run_step(step)
    return transfer


def loads(side: Any, what: str) -> list[int]:
    return [domain[what] for domain in side.engine.domain_metrics()]


def test_bytes_arrive_over_all_domains_of_both_sides_in_equal_shares(both: Pair) -> None:
    source, destination = list(range(48)), [63 - number for number in range(48)]
    send(both, source, destination)
    (full,) = both.receiver.wait(InboxFull)
    (done,) = both.sender.wait(TransferDone)
    assert full.extents == done.stats.extents == LAYERS * 48
    assert (both.receiver.bytes[:, destination] == both.sender.bytes[:, source]).all()
    assert not both.receiver.bytes[:, :16].any()
    sent, arrived = loads(both.sender, "bytes"), loads(both.receiver, "immediates")
    assert sum(sent) == done.stats.bytes == both.sender.metric("bytes")
    assert sum(loads(both.sender, "writes")) == sum(arrived) == done.stats.writes
    for shares in (sent, arrived):
        assert max(shares) <= 1.1 * sum(shares) / len(shares)


@pytest.mark.parametrize("provider", ["auto", "local"])
def test_agents_of_one_host_have_a_lane_for_each_meeting_too(provider: str) -> None:
    with pair(provider, domains=domains(2, 3), layers=LAYERS, page_bytes=128 << 10) as both:
        both.sender.fill()
        send(both, list(range(32)), list(range(31, -1, -1)))
        both.receiver.wait(InboxFull)
        both.sender.wait(TransferDone)
        assert (both.receiver.bytes[:, :32] == both.sender.bytes[:, 31::-1]).all()
        assert all(loads(both.sender, "writes"))
        assert all(loads(both.receiver, "immediates"))


@pytest.mark.parametrize("provider", ["auto", "local", "tcp"])
def test_as_many_domains_as_an_agent_has_meet_the_one_of_another(provider: str) -> None:
    with pair(provider, domains=domains(64, 1), layers=1, page_bytes=128 << 10) as both:
        both.sender.fill()
        send(both, list(range(64)), list(range(63, -1, -1)))
        both.receiver.wait(InboxFull)
        both.sender.wait(TransferDone)
        assert (both.receiver.bytes == both.sender.bytes[:, ::-1]).all()
        assert loads(both.sender, "writes") == [1] * 64


def test_each_layer_is_sent_when_it_is_ready_whichever_way_it_goes(both: Pair) -> None:
    transfer = both.open([3], [5])
    both.sender.engine.submit_chunks([(transfer, 0, 0, 1, True)])
    for layer in range(LAYERS):
        assert not both.receiver.bytes[layer].any()
        both.sender.layer_counter.advance(layer + 1)
        wait_until(lambda count=layer + 1: both.receiver.metric("extents_received") == count, "the layer")
        assert (both.receiver.bytes[layer, 5] == both.sender.bytes[layer, 3]).all()
    both.sender.wait(TransferDone)


def test_every_lane_that_was_used_proves_its_delivery(both: Pair) -> None:
    """A batch's last write on each lane asks for it: more would cost time, less would prove nothing."""
    send(both, list(range(0, 64, 2)), list(range(1, 64, 2)))
    both.sender.wait(TransferDone)
    ours, theirs = (len(loads(side, "writes")) for side in (both.sender, both.receiver))
    lanes = ours + theirs - gcd(ours, theirs)
    assert both.sender.metric("delivery_completions") == LAYERS * lanes


def test_neighbours_still_leave_as_one_write(two: Pair) -> None:
    """A batch of 2 MiB in one piece is cut once, into two."""
    transfer = send(two, list(range(16)), list(range(20, 36)))
    (done,) = two.sender.wait(TransferDone)
    assert done.transfer == transfer
    assert done.stats.writes == LAYERS * 2
    assert (two.receiver.bytes[:, 20:36] == two.sender.bytes[:, :16]).all()


def test_small_batches_are_not_divided_but_take_turns() -> None:
    with pair("tcp", domains=domains(2, 2), layers=60, pages=4, page_bytes=4096) as both:
        both.sender.fill()
        send(both, [0, 1], [2, 3])
        (done,) = both.sender.wait(TransferDone)
        assert done.stats.writes == 60
        assert all(25 <= writes <= 35 for writes in loads(both.sender, "writes"))
        assert (both.receiver.bytes[:, 2:] == both.sender.bytes[:, :2]).all()


def test_a_region_may_be_served_by_some_of_the_domains(two: Pair) -> None:
    """As that of one GPU: registered with its own NIC only, at both ends with another."""
    engine = two.receiver.engine
    theirs, [(_, key, base)] = engine.register_region(two.receiver.memory.fd, two.receiver.memory.length, [1])
    ours, [(domain, _, _)] = two.sender.engine.register_region(two.sender.memory.fd, two.sender.memory.length, [0])
    assert domain == 0
    stream = (ours, *two.stream()[1:3], [(1, key, base)], *two.stream()[4:])
    before = loads(two.sender, "writes"), loads(two.receiver, "immediates")
    send(two, [7], [9], streams=[stream])
    two.receiver.wait(InboxFull)
    two.sender.wait(TransferDone)
    assert (two.receiver.bytes[:, 9] == two.sender.bytes[:, 7]).all()
    assert [after - b for after, b in zip(loads(two.sender, "writes"), before[0], strict=True)] == [LAYERS, 0]
    assert [after - b for after, b in zip(loads(two.receiver, "immediates"), before[1], strict=True)] == [0, LAYERS]
    two.sender.engine.deregister_region(ours)
    engine.deregister_region(theirs)


def test_the_fence_closes_an_endpoint_in_every_domain(large: Pair) -> None:
    transfer = send(large, list(range(64)), list(range(64)))
    wait_until(lambda: min(loads(large.receiver, "immediates")) > 0, "writes in both domains")
    assert large.receiver.engine.close_endpoint(large.endpoint) in ([], [[1, 0]])
    before = large.receiver.bytes.copy()
    large.sender.wait(TransferFailed, TransferDone)
    assert (large.receiver.bytes == before).all()
    assert large.receiver.metric("endpoints") == 0
    with pytest.raises(FabricError, match="endpoint"):
        large.receiver.engine.close_endpoint(large.endpoint)
    assert transfer == 1


def test_a_peer_that_dies_fails_all_its_transfers_once(large: Pair) -> None:
    send(large, list(range(64)), list(range(64)))
    large.sender.wait(TransferDone)
    before = loads(large.sender, "writes")
    transfers = [large.open(list(range(0, 64, 2)), list(range(1, 64, 2)), slot=slot) for slot in (5, 6, 7)]
    large.sender.engine.submit_chunks([(transfer, 1, 0, 32, True) for transfer in transfers])
    large.receiver.signal(signal.SIGSTOP)
    large.run_step(1)
    wait_until(lambda: all(map(gt, loads(large.sender, "writes"), before)), "writes from both domains")
    large.receiver.signal(signal.SIGKILL)
    failed = large.sender.wait(TransferFailed, count=3)
    assert {each.transfer for each in failed} == set(transfers)
    assert len(large.sender.wait(PeerFailed)) == 1
    assert not [event for event in large.sender.engine.events() if isinstance(event, TransferFailed | TransferDone)]
    assert large.sender.metric("writes_in_flight") == large.sender.metric("transfers") == 0
    large.sender.engine.deregister_region(large.sender.region)


@pytest.mark.parametrize("at", ["post", "completion"])
def test_what_fails_in_one_domain_fails_the_peer_and_the_other_domain_lets_go(two: Pair, at: str) -> None:
    """Half of the bytes would have been of no use to anybody."""
    two.sender.engine.set_faults([FaultRule(at, "error", domain=1, nth=2, times=1).native()])
    transfer = send(two, list(range(32)), list(range(31, -1, -1)))
    (failed,) = two.sender.wait(TransferFailed)
    (peer,) = two.sender.wait(PeerFailed)
    assert (failed.transfer, failed.reason, peer.peer) == (transfer, "WRITE_FAILED", two.peer)
    assert two.sender.metric("writes_in_flight") == two.sender.metric("transfers") == 0
    with pytest.raises(FabricError, match="connect again"):
        two.open([0], [0], slot=99)
    two.sender.engine.set_faults([])
    two.sender.engine.disconnect(two.peer)
    two.receiver.engine.close_endpoint(two.endpoint)
    two.connect()
    two.receiver.bytes[:] = 0
    send(two, list(range(32)), list(range(31, -1, -1)))
    two.sender.wait(TransferDone)
    assert (two.receiver.bytes[:, :32] == two.sender.bytes[:, 31::-1]).all()


def test_a_transfer_is_not_done_before_the_slower_domain_has_delivered(two: Pair) -> None:
    two.sender.engine.set_faults([FaultRule("completion", "hold", domain=1).native()])
    send(two, list(range(16)), list(range(16)))
    two.receiver.wait(InboxFull)
    wait_until(lambda: two.sender.metric("writes_in_flight") == loads(two.sender, "writes")[1], "domain 0 is through")
    assert not two.sender.engine.events()
    two.sender.engine.release_faults()
    two.sender.wait(TransferDone)


def test_a_domain_that_stands_still_is_noticed_by_its_own_deadline(impatient: Pair) -> None:
    impatient.sender.engine.set_faults([FaultRule("post", "hold", domain=0).native()])
    send(impatient, list(range(16)), list(range(16)))
    (failed,) = impatient.sender.wait(TransferFailed)
    assert failed.reason == "POST_TIMEOUT"
    assert loads(impatient.sender, "writes")[0] == 0 < loads(impatient.sender, "writes")[1]


def test_cancel_waits_for_both_domains(two: Pair) -> None:
    two.sender.engine.set_faults([FaultRule("completion", "hold", domain=1).native()])
    transfer = two.open(list(range(16)), list(range(16)))
    two.sender.engine.submit_chunks([(transfer, 0, 0, 16, True)])
    two.sender.layer_counter.advance(1)
    wait_until(lambda: two.receiver.metric("extents_received") == 16, "the layer")
    two.sender.engine.cancel_transfer(transfer)
    wait_until(lambda: two.sender.metric("writes_in_flight") == loads(two.sender, "writes")[1], "domain 0 is through")
    assert not two.sender.engine.events()
    two.run_step(0)
    two.sender.engine.release_faults()
    (cancelled,) = two.sender.wait(TransferCancelled)
    assert cancelled.quiesced
    assert two.receiver.metric("extents_received") == 16
    assert not two.receiver.bytes[1:].any()


def test_a_long_transfer_holds_back_a_short_one_in_no_domain() -> None:
    """Nothing completes, so each domain has one window of writes: the short one's are among them, although the long one
    is ready first and would fill every window alone."""
    with pair("tcp", domains=domains(2, 2), layers=1, pages=512, page_bytes=128 << 10) as both:
        both.sender.engine.set_faults([FaultRule("completion", "hold").native()])
        pages = list(range(0, 512, 2))
        long, short = both.open(pages, pages), both.open([1, 3], [1, 3])
        both.run_step(0)
        both.sender.engine.submit_chunks([(long, 0, 0, len(pages), True), (short, 0, 0, 2, True)])
        (full,) = both.receiver.wait(InboxFull)
        assert (full.slot, full.extents) == (2, 2)
        window = both.sender.engine.capabilities()[0]["window"]
        wait_until(lambda: loads(both.sender, "writes") == [window] * 2, "both windows are full")
        both.sender.engine.release_faults()
        both.sender.engine.set_faults([])
        assert [done.transfer for done in both.sender.wait(TransferDone, count=2)] == [short, long]
        both.receiver.wait(InboxFull)


def test_peers_share_each_domain_however_many_endpoints_they_have() -> None:
    """One of four domains, and one of a single one, whose transfers are ready at the same time."""
    shape = {"layers": 1, "pages": 512, "page_bytes": 128 << 10}
    with pair("tcp", domains=domains(2, 4), **shape) as both:
        single = make_side("tcp", domains=addresses(22, 1), **shape)
        try:
            endpoint, remote = single.engine.open_endpoint()
            peer = both.sender.engine.connect(remote)
            single.engine.open_inbox(endpoint, 0, 0, 512)
            pages = list(range(512))
            stream = (*both.stream()[:3], single.remotes, *both.stream()[4:])
            both.sender.engine.open_transfer(99, peer, 0, 0, both.sender.counter, 1, [stream], pages, pages)
            transfer = both.open(pages, pages)
            both.run_step(0)
            both.sender.engine.submit_chunks([(transfer, 0, 0, 512, True), (99, 0, 0, 512, True)])
            both.sender.wait(TransferDone)
            # The first has all of its half, the other two fifths or more: if one came after the other, nothing.
            each = both.sender.memory.length / 2
            assert min(loads(both.sender, "bytes")) >= 1.4 * each
            both.sender.wait(TransferDone)
            assert loads(both.sender, "bytes") == [2 * each] * 2
        finally:
            single.close()


def test_many_transfers_at_once_are_exact(both: Pair) -> None:
    rng = np.random.default_rng(3)
    source, destination = rng.permutation(64), rng.permutation(64)
    transfers = [
        both.open(source[first : first + 4].tolist(), destination[first : first + 4].tolist())
        for first in range(0, 64, 4)
    ]
    both.sender.engine.submit_chunks([(transfer, 0, 0, 4, True) for transfer in transfers])
    both.run_step(0)
    assert {done.transfer for done in both.sender.wait(TransferDone, count=16)} == set(transfers)
    both.receiver.wait(InboxFull, count=16)
    assert (both.receiver.bytes[:, destination] == both.sender.bytes[:, source]).all()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "BAD_DOMAINS"),
        (["127.0.0.2", "127.0.0.2"], "BAD_DOMAINS"),
        (["127.0.0.2", "203.0.113.1"], "PROVIDER_UNAVAILABLE"),
    ],
)
def test_domains_that_can_not_be_are_refused(names: list[str], reason: str) -> None:
    with pytest.raises(FabricError) as error:
        Engine("tcp", names)
    assert error.value.reason == reason


def test_numbers_of_domains_and_endpoints_are_checked(two: Pair) -> None:
    engine = two.sender.engine
    for domains in ([], [2], [0, 0]):
        for call in (
            lambda chosen: engine.register_region(two.sender.memory.fd, 4096, chosen),
            engine.open_endpoint,
            lambda chosen: engine.connect([b"x" * 16], chosen),
        ):
            with pytest.raises(FabricError, match="domains") as error:
                call(domains)
            assert error.value.reason == "BAD_ARGUMENT"
    for remotes in ([], [(2, 0, 0)]):
        stream = (*two.stream()[:3], remotes, *two.stream()[4:])
        with pytest.raises(FabricError, match="endpoints") as error:
            two.open([0], [0], streams=[stream], slot=50)
        assert error.value.reason == "BAD_ARGUMENT"
    with pytest.raises(FabricError) as error:
        engine.connect([])
    assert error.value.reason == "BAD_ADDRESS"


def test_a_domain_can_be_named_by_its_device() -> None:
    by_address = Engine("tcp", ["127.0.0.1"])
    device = by_address.capabilities()[0]["domain"]
    by_address.close()
    engine = Engine("tcp", [str(device)])
    try:
        (found,) = engine.capabilities()
        assert found["domain"] == device
        assert found["address"]
    finally:
        engine.close()
