"""How a batch is divided among the lanes between two groups of domains."""

from __future__ import annotations

from collections import Counter
from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from baton_fabric._native import spread

counts = st.integers(1, 16)
extents = st.integers(0, 1 << 20)
quanta = st.integers(1, 4096)
numbers = st.integers(0, 1 << 63)


@given(counts, counts, extents, quanta, numbers, numbers)
def test_every_extent_goes_over_one_lane_and_runs_are_not_cut_small(sources, destinations, count, quantum, batch, salt):
    lanes = spread(sources, destinations, count, quantum, batch, salt)
    assert lanes == spread(sources, destinations, count, quantum, batch, salt)
    assert [first for *_, first, _ in lanes] == [0, *(end for *_, end in lanes[:-1])]
    assert lanes[-1][3] == count
    assert all(first <= end for *_, first, end in lanes)
    assert all(first == end or end - first >= min(quantum, count) - 1 for *_, first, end in lanes)


@given(counts, counts)
def test_every_domain_takes_part_and_equal_groups_meet_one_to_one(sources, destinations):
    lanes = [lane[:2] for lane in spread(sources, destinations, 0, 1, 0, 0)]
    assert len(set(lanes)) == len(lanes) == sources + destinations - gcd(sources, destinations)
    assert {source for source, _ in lanes} == set(range(sources))
    assert {destination for _, destination in lanes} == set(range(destinations))
    if sources == destinations:
        assert lanes == [(number, number) for number in range(sources)]


def shares(sources, destinations, count, quantum, batch, salt):
    """Extents of each domain of ours, and of the peer's."""
    ours, theirs = Counter(), Counter()
    for source, destination, first, end in spread(sources, destinations, count, quantum, batch, salt):
        ours[source] += end - first
        theirs[destination] += end - first
    return ours, theirs


@given(counts, counts, extents, quanta, numbers, numbers)
def test_each_domain_has_its_share_of_a_batch_up_to_two_pieces(sources, destinations, count, quantum, batch, salt):
    """One at either end of what it has, each of less than two quanta."""
    for side, of in zip(
        shares(sources, destinations, count, quantum, batch, salt), (sources, destinations), strict=True
    ):
        for number in range(of):
            assert abs(side[number] - count / of) <= 4 * quantum


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(1, 8), st.integers(0, 1 << 40))
def test_over_the_layers_of_a_transfer_even_single_pages_fall_evenly(sources, destinations, count, quantum, salt):
    layers = 240
    ours, theirs = Counter(), Counter()
    for layer in range(layers):
        for total, side in zip((ours, theirs), shares(sources, destinations, count, quantum, layer, salt), strict=True):
            total.update(side)
    for total, of in ((ours, sources), (theirs, destinations)):
        for number in range(of):
            # Of a sequence as even as can be: what one batch can't divide is owed to nobody for long.
            assert abs(total[number] - layers * count / of) <= 8 * min(2 * quantum, count) + 8
