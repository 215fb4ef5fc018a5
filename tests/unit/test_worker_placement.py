"""Which data-parallel engine gets a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.placement import EngineLoad, place

LOADS = st.lists(
    st.builds(EngineLoad, st.integers(0, 64), st.integers(0, 4), st.integers(0, 8), st.just(16), st.integers(0, 16))
    | st.builds(EngineLoad, st.integers(0, 64), st.integers(0, 4), st.integers(0, 8)),
    min_size=1,
    max_size=6,
)


def at_once(load: EngineLoad, pages: int) -> bool:
    return load.waiting == 0 and pages - load.cached <= load.free - load.idle


@given(LOADS, st.integers(1, 64))
def test_nobody_waits_where_another_engine_has_room(loads: list[EngineLoad], pages: int) -> None:
    chosen = loads[place(loads, pages)]
    if any(at_once(load, pages) for load in loads):
        assert at_once(chosen, pages)
        assert all(not at_once(load, pages) or load.free + load.cached <= chosen.free + chosen.cached for load in loads)
    else:
        assert chosen.waiting == min(load.waiting for load in loads)


def test_small_requests_are_not_sent_past_an_engine_that_holds_one_large_one() -> None:
    assert place([EngineLoad(900, 0, 31, max_batch=32), EngineLoad(500, 0, 1, max_batch=32)], 5) == 0
    assert place([EngineLoad(895, 0, 32, max_batch=32), EngineLoad(500, 0, 1, max_batch=32)], 5) == 1
    # Where neither batch has a place, fewer are before it.
    assert place([EngineLoad(900, 0, 40, max_batch=32), EngineLoad(500, 0, 33, max_batch=32)], 5) == 1


@given(st.integers(1, 6), st.integers(1, 40))
def test_equal_requests_are_shared_out_evenly(engines: int, requests: int) -> None:
    held = [0] * engines
    for _ in range(requests):
        held[place([EngineLoad(1000 - 8 * n, 0, n) for n in held], 8)] += 1
    assert max(held) - min(held) <= 1


def test_a_prefix_draws_requests_until_its_engine_is_fuller_by_as_much_as_it_saves() -> None:
    assert place([EngineLoad(50, 0, 0), EngineLoad(40, 0, 2, cached=20)], 30) == 1
    assert place([EngineLoad(50, 0, 0), EngineLoad(25, 0, 5, cached=20)], 30) == 0


def test_a_prefix_that_nobody_holds_is_not_room_for_more() -> None:
    assert place([EngineLoad(20, 0, 0), EngineLoad(20, 0, 0, cached=15, idle=15)], 20) == 1
    assert place([EngineLoad(21, 0, 0), EngineLoad(20, 0, 0, cached=15, idle=15)], 21) == 0
