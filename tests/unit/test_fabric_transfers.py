"""Bytes, counts and statistics of transfers between two engines, over every local transport."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_fabric._native import Engine, InboxFull, InboxViolation, TransferDone
from fabric_harness import NODE, Pair, fabrics, make_side, pair, wait_until

PROVIDERS = fabrics("tcp", "shm", "local", "tcp;ofi_rxm")
ONE = PROVIDERS[0]


@pytest.fixture(scope="module", params=PROVIDERS)
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(request.param) as both:
        both.sender.fill()
        yield both


class Run:
    """One step of the model on a pair whose counter has been used before."""

    def __init__(self, both: Pair) -> None:
        self.both = both
        layers = both.sender.layers
        self.step = both.sender.layer_counter.value() // layers
        self.base = self.step * layers
        both.receiver.bytes[:] = 0

    def go(self) -> None:
        self.both.run_step(self.step)

    def finish(self) -> tuple[TransferDone, InboxFull]:
        (done,) = self.both.sender.wait(TransferDone)
        (full,) = self.both.receiver.wait(InboxFull)
        self.both.receiver.engine.close_inbox(full.slot, full.generation)
        return done, full


def moved(both: Pair, source_pages: list[int], destination_pages: list[int]) -> bool:
    """Exactly these pages arrived, and nothing beside them."""
    expected = np.zeros_like(both.receiver.bytes)
    expected[:, destination_pages] = both.sender.bytes[:, source_pages]
    return bool((both.receiver.bytes == expected).all())


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_plan_may_come_before_during_or_after_its_step(both: Pair, when: str) -> None:
    run = Run(both)
    source, destination = [3, 4, 5, 9, 1], [10, 11, 12, 40, 63]
    transfer = both.open(source, destination)
    layers = both.sender.layers
    if when == "before":
        both.sender.engine.submit_chunks([(transfer, run.base, 0, 5, True)])
        run.go()
    elif when == "during":
        both.sender.layer_counter.advance(run.base + layers // 2)
        both.sender.engine.submit_chunks([(transfer, run.base, 0, 5, True)])
        both.sender.layer_counter.advance(run.base + layers)
    else:
        run.go()
        both.sender.engine.submit_chunks([(transfer, run.base, 0, 5, True)])
    done, full = run.finish()
    assert moved(both, source, destination)
    assert done.transfer == transfer
    assert full.extents == done.stats.extents == 5 * layers
    assert done.stats.bytes == 5 * layers * both.sender.page_bytes


def test_a_layer_is_sent_when_it_is_complete_and_not_before(both: Pair) -> None:
    run = Run(both)
    transfer = both.open([0, 1], [20, 21])
    both.sender.engine.submit_chunks([(transfer, run.base, 0, 2, True)])
    for layer in range(both.sender.layers):
        both.sender.layer_counter.advance(run.base + layer + 1)
        wait_until(
            lambda layer=layer: (both.receiver.bytes[layer, 20:22] == both.sender.bytes[layer, :2]).all(),
            f"layer {layer} arrives",
        )
        assert not both.receiver.bytes[layer + 1 :].any()
    run.finish()


def test_chunks_over_several_steps_and_two_transfers_in_one_call(both: Pair) -> None:
    run = Run(both)
    layers = both.sender.layers
    first = both.open([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    second = both.open([10, 11, 12], [30, 32, 34])
    both.sender.engine.submit_chunks([(first, run.base, 0, 2, False), (second, run.base, 0, 0, False)])
    both.run_step(run.step)
    both.sender.engine.submit_chunks(
        [(first, run.base + layers, 2, 0, False), (second, run.base + layers, 0, 3, False)]
    )
    both.sender.engine.submit_chunks([(first, run.base + 2 * layers, 2, 3, True)])
    both.run_step(run.step + 1)
    both.run_step(run.step + 2)
    both.sender.engine.submit_chunks([(second, run.base + 3 * layers, 0, 0, True)])
    done = both.sender.wait(TransferDone, count=2)
    for full in both.receiver.wait(InboxFull, count=2):
        assert both.receiver.engine.close_inbox(full.slot, full.generation)
    assert {each.transfer for each in done} == {first, second}
    assert moved(both, [0, 1, 2, 3, 4, 10, 11, 12], [5, 6, 7, 8, 9, 30, 32, 34])


@pytest.mark.parametrize("empty", ["no pages", "no streams", "no extents"])
def test_a_transfer_of_nothing_is_done_at_once_and_later_plans_are_ignored(both: Pair, empty: str) -> None:
    pages = [] if empty == "no pages" else [1]
    streams = {"no pages": [both.stream()], "no streams": [], "no extents": [(*both.stream()[:-1], [])]}[empty]
    transfer = both.open(pages, pages, streams=streams)
    (done,) = both.sender.wait(TransferDone)
    (full,) = both.receiver.wait(InboxFull)
    assert (done.transfer, done.stats.bytes, done.stats.writes) == (transfer, 0, 0)
    assert (full.extents, full.first_ns) == (0, full.full_ns)
    late = both.sender.metric("late_chunks")
    both.sender.engine.submit_chunks([(transfer, 0, 0, len(pages), True)])
    assert both.sender.metric("late_chunks") == late + 1
    assert both.receiver.engine.close_inbox(full.slot, full.generation)


def test_slices_of_heads_from_two_regions_into_one(both: Pair) -> None:
    """Sender ranks with half of the heads each, a receiver with all: K and V parts are extents of their own."""
    run = Run(both)
    half, page = both.sender.page_bytes // 4, both.sender.page_bytes
    extents_a = [(0, 0, half), (half, 2 * half, half)]
    extents_b = [(2 * half, half, half), (3 * half, 3 * half, half)]
    transfer = both.open([7, 8], [50, 51], streams=[both.stream(*extents_a), both.stream(*extents_b)])
    both.sender.engine.submit_chunks([(transfer, run.base, 0, 2, True)])
    run.go()
    done, full = run.finish()
    assert done.stats.extents == full.extents == 2 * 2 * 2 * both.sender.layers
    source = both.sender.bytes[:, 7:9].reshape(both.sender.layers, 2, 4, half)
    arrived = both.receiver.bytes[:, 50:52].reshape(both.sender.layers, 2, 4, half)
    assert (arrived == source[:, :, [0, 2, 1, 3]]).all()
    assert np.count_nonzero(both.receiver.bytes) == both.sender.layers * 2 * page


def test_neighbours_on_both_sides_leave_as_one_write(both: Pair) -> None:
    run = Run(both)
    source = [*range(16), 20, 21, 30]
    destination = [*range(8, 24), 40, 41, 50]
    transfer = both.open(source, destination)
    both.sender.engine.submit_chunks([(transfer, run.base, 0, len(source), True)])
    run.go()
    done, _ = run.finish()
    assert done.stats.writes == 3 * both.sender.layers
    assert done.stats.extents == len(source) * both.sender.layers
    assert moved(both, source, destination)


def test_neighbours_on_one_side_only_do_not(both: Pair) -> None:
    run = Run(both)
    source, destination = [0, 1, 2], [9, 8, 7]
    transfer = both.open(source, destination)
    both.sender.engine.submit_chunks([(transfer, run.base, 0, 3, True)])
    run.go()
    done, _ = run.finish()
    assert done.stats.writes == 3 * both.sender.layers
    assert moved(both, source, destination)


def test_statistics_tell_where_the_time_went(both: Pair) -> None:
    run = Run(both)
    transfer = both.open([0], [1])
    both.sender.engine.submit_chunks([(transfer, run.base, 0, 1, True)])
    run.go()
    done, full = run.finish()
    stats = done.stats
    assert (stats.pages, stats.writes) == (1, both.sender.layers)
    assert 0 < stats.first_post_ns <= stats.last_completion_ns
    assert 0 < stats.final_layer_ns <= stats.last_completion_ns
    assert stats.duration_us == (stats.last_completion_ns - stats.first_post_ns) // 1000
    assert stats.exposed_us == (stats.last_completion_ns - stats.final_layer_ns) // 1000
    assert stats.overlapped_us <= stats.duration_us <= stats.overlapped_us + stats.exposed_us + 1
    assert full.first_ns <= full.full_ns


def test_immediates_of_another_generation_change_nothing(both: Pair) -> None:
    run = Run(both)
    slot = both.next_slot()
    both.receiver.engine.open_inbox(both.endpoint, slot, 300, both.sender.layers)
    stale = both.receiver.metric("stale_immediates")
    old = both.open([1], [1], slot=slot, generation=299)
    both.sender.engine.submit_chunks([(old, run.base, 0, 1, True)])
    run.go()
    both.sender.wait(TransferDone)
    wait_until(
        lambda: both.receiver.metric("stale_immediates") == stale + both.sender.layers, "stale immediates are counted"
    )
    # Only the low 8 bits of a generation travel.
    run = Run(both)
    new = both.open([2], [2], slot=slot, generation=300 % 256)
    both.sender.engine.submit_chunks([(new, run.base, 0, 1, True)])
    run.go()
    _, full = run.finish()
    assert (full.slot, full.generation, full.extents) == (slot, 300, both.sender.layers)


@pytest.mark.parametrize("pages", [[0, 2, 4], [0, 1, 2]], ids=["after it was full", "skipping full"])
def test_more_extents_than_expected_is_a_violation_reported_once(both: Pair, pages: list[int]) -> None:
    run = Run(both)
    violations = both.receiver.metric("violations")
    full_before = both.receiver.metric("inboxes_full")
    expected = 3 * both.sender.layers - 2
    transfer = both.open(pages, pages, expected=expected)
    both.sender.engine.submit_chunks([(transfer, run.base, 0, 3, True)])
    run.go()
    both.sender.wait(TransferDone)
    if pages == [0, 2, 4]:  # one by one: the tenth fills it, two more follow
        both.receiver.wait(InboxFull)
        full_before += 1
    (violation,) = both.receiver.wait(InboxViolation)
    assert violation.expected == expected < violation.extents
    assert not both.receiver.engine.close_inbox(violation.slot, violation.generation)
    assert both.receiver.metric("violations") == violations + 1
    assert both.receiver.metric("inboxes_full") == full_before


@pytest.mark.parametrize("page_bytes", [64, 64 << 10], ids=["small writes", "large writes"])
def test_a_long_transfer_does_not_hold_back_a_short_one(page_bytes: int) -> None:
    with pair(ONE, layers=2, pages=1024, page_bytes=page_bytes) as both:
        both.sender.fill()
        pages = list(range(0, 1024, 2))
        long, short = both.open(pages, pages), both.open([1], [1])
        both.run_step(0)  # all is ready at once, the long one first
        both.sender.engine.submit_chunks([(long, 0, 0, len(pages), True), (short, 0, 0, 1, True)])
        done = both.sender.wait(TransferDone, count=2)
        assert [each.transfer for each in done] == [short, long]
        both.receiver.wait(InboxFull, count=2)
        assert moved(both, [*pages, 1], [*pages, 1])


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[int, int, int]], list[int], list[int]]:
    """Source and destination pages, extents, chunk sizes, and after which chunk's plan each step is run."""
    pages = draw(st.integers(1, 24))
    source = draw(st.permutations(range(64)))[:pages]
    destination = draw(st.permutations(range(64)))[:pages]
    if draw(st.booleans()):
        source, destination = sorted(source), sorted(destination)
    cuts = sorted(draw(st.lists(st.integers(0, pages), max_size=3)))
    chunks = [end - start for start, end in zip([0, *cuts], [*cuts, pages], strict=True)]
    boundaries = sorted(draw(st.sets(st.integers(0, 4096), min_size=2, max_size=5)))
    pieces = list(pairwise(boundaries))
    targets = draw(st.permutations(pieces))
    offset, extents = 0, []
    for start, end in targets:
        extents.append((start, offset, end - start))
        offset += end - start
    delays = [draw(st.integers(0, 2)) for _ in chunks]
    return source, destination, extents, chunks, delays


@settings(max_examples=40)
@given(transfers())
def test_any_transfer_moves_exactly_its_bytes(
    both: Pair, case: tuple[list[int], list[int], list[tuple[int, int, int]], list[int], list[int]]
) -> None:
    source, destination, extents, chunks, delays = case
    run = Run(both)
    layers = both.sender.layers
    transfer = both.open(source, destination, streams=[both.stream(*extents)])
    first, submitted = 0, 0
    for step in range(len(chunks) + 2):
        # The plan of chunk c comes up to two steps after its own, in order.
        while submitted < len(chunks) and max(index + delays[index] for index in range(submitted + 1)) <= step:
            last = submitted == len(chunks) - 1
            both.sender.engine.submit_chunks(
                [(transfer, run.base + submitted * layers, first, chunks[submitted], last)]
            )
            first += chunks[submitted]
            submitted += 1
        both.run_step(run.step + step)
    done, full = run.finish()
    assert full.extents == done.stats.extents == layers * len(source) * len(extents)
    expected = np.zeros_like(both.receiver.bytes)
    for s, d in zip(source, destination, strict=True):
        for source_offset, destination_offset, length in extents:
            expected[:, d, destination_offset : destination_offset + length] = both.sender.bytes[
                :, s, source_offset : source_offset + length
            ]
    assert (both.receiver.bytes == expected).all()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_small_writes_are_neither_dropped_nor_counted_twice(provider: str) -> None:
    """Far more writes than any queue holds: refusals are normal and exact."""
    with pair(provider, layers=4, pages=4096, page_bytes=64) as both:
        both.sender.fill()
        source = list(range(0, 4096, 2))
        destination = source[::-1]
        transfer = both.open(source, destination)
        both.run_step(0)
        both.sender.engine.submit_chunks([(transfer, 0, 0, len(source), True)])
        (done,) = both.sender.wait(TransferDone)
        (full,) = both.receiver.wait(InboxFull)
        assert moved(both, source, destination)
        assert done.stats.writes == done.stats.extents == full.extents == len(source) * 4
        # A ring has room for every write that may be in flight.
        assert (both.sender.metric("eagain") > 0) is (provider not in ("local", "auto"))
        assert both.sender.metric("completions") == both.sender.metric("writes") == done.stats.writes
        assert both.receiver.metric("extents_received") == full.extents


def test_a_write_carries_at_most_4095_extents() -> None:
    with pair(ONE, layers=1, pages=5000, page_bytes=16) as both:
        both.sender.fill()
        pages = list(range(5000))
        transfer = both.open(pages, pages)
        both.run_step(0)
        both.sender.engine.submit_chunks([(transfer, 0, 0, 5000, True)])
        (done,) = both.sender.wait(TransferDone)
        (full,) = both.receiver.wait(InboxFull)
        assert (done.stats.writes, full.extents) == (2, 5000)
        assert moved(both, pages, pages)


def test_two_senders_to_one_receiver_and_back() -> None:
    with pair(ONE) as both:
        both.sender.fill(1)
        third = make_side(ONE)
        try:
            third.fill(2)
            endpoint, [address] = both.receiver.engine.open_endpoint()
            peer = third.engine.connect([address])
            both.receiver.engine.open_inbox(endpoint, 77, 0, 4)
            stream = (third.region, *both.stream()[1:])
            third.engine.open_transfer(1, peer, 77, 0, third.counter, 4, [stream], [0], [60])
            own = both.open([5], [61])
            both.sender.engine.submit_chunks([(own, 0, 0, 1, True)])
            third.engine.submit_chunks([(1, 0, 0, 1, True)])
            third.layer_counter.advance(4)
            both.run_step(0)
            assert len(both.receiver.wait(InboxFull, count=2)) == 2
            assert (both.receiver.bytes[:, 60] == third.bytes[:, 0]).all()
            assert (both.receiver.bytes[:, 61] == both.sender.bytes[:, 5]).all()
        finally:
            third.close()


def test_a_spinning_engine_moves_the_same_bytes() -> None:
    with pair(ONE) as both:
        both.sender.fill()
        spinning = Engine(ONE, [NODE], spin=True)
        try:
            region, _ = spinning.register_region(both.sender.memory.fd, both.sender.memory.length)
            counter = spinning.attach_counter(
                both.sender.layer_counter.memory_fd, both.sender.layer_counter.doorbell_fd
            )
            endpoint, [address] = both.receiver.engine.open_endpoint()
            both.receiver.engine.open_inbox(endpoint, 5, 0, 4)
            peer = spinning.connect([address])
            spinning.open_transfer(1, peer, 5, 0, counter, 4, [(region, *both.stream()[1:])], [0], [1])
            spinning.submit_chunks([(1, 0, 0, 1, True)])
            both.run_step(0)
            both.receiver.wait(InboxFull)
            assert moved(both, [0], [1])
            assert spinning.metrics()["wakeups"] == 0
        finally:
            spinning.close()
