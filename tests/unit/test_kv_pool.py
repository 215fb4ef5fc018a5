"""The page pool: whose page is it, and who gets it next."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv.errors import InvalidKvArgument
from baton_kv.pool import (
    OwnerNotQuarantined,
    OwnerQuarantined,
    PageNotHeld,
    PagePool,
    PageQuarantined,
    PoolExhausted,
    UnknownOwner,
)


def test_a_fresh_pool_gives_neighbours() -> None:
    assert PagePool(8).allocate(5, "a") == [0, 1, 2, 3, 4]


def test_the_shortest_run_that_fits_is_used() -> None:
    pool = PagePool(16)
    for owner, count in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        pool.allocate(count, owner)
    pool.release("a")
    pool.release("c")
    assert pool.free_runs() == [range(5), range(6, 9), range(10, 16)]
    assert pool.allocate(3, "e") == [6, 7, 8]
    assert pool.allocate(5, "f") == [0, 1, 2, 3, 4]


def test_without_a_run_long_enough_the_longest_are_joined_in_order() -> None:
    pool = PagePool(10)
    for owner, count in (("a", 2), ("b", 1), ("c", 3), ("d", 1), ("e", 3)):
        pool.allocate(count, owner)
    for owner in ("a", "c", "e"):
        pool.release(owner)
    assert pool.allocate(7, "f") == [0, 3, 4, 5, 7, 8, 9]
    assert pool.free == 1


def test_freed_neighbours_join_into_one_run() -> None:
    pool = PagePool(6)
    for owner in "abc":
        pool.allocate(2, owner)
    for owner in "acb":
        pool.release(owner)
    assert pool.free_runs() == [range(6)]
    assert pool.longest_free_run == 6


def test_exhaustion_names_what_was_asked_and_changes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(3, "a")
    with pytest.raises(PoolExhausted) as refused:
        pool.allocate(2, "b")
    assert (refused.value.requested, refused.value.free) == (2, 1)
    assert refused.value.status == "RESOURCE_EXHAUSTED"
    assert pool.owners == {"a"}
    assert pool.free == 1


def test_a_page_returns_when_its_last_owner_lets_go() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2, ("request", 1))
    pool.hold(pages, ("transfer", 7))
    pool.release(("request", 1))
    assert pool.free == 2
    pool.release(("transfer", 7))
    assert pool.free == 4


def test_quarantined_pages_come_back_only_when_quarantine_ends() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3, ("request", 1))
    pool.hold(pages, ("transfer", 7))
    pool.quarantine(("transfer", 7), "peer silent", now=10.0)
    pool.release(("request", 1))
    assert (pool.free, pool.held, pool.quarantined) == (1, 0, 3)
    assert pool.oldest_quarantine_age(now=12.5) == 2.5
    assert pool.quarantines[("transfer", 7)].reason == "peer silent"
    with pytest.raises(PageQuarantined):
        pool.hold(pages[:1], ("request", 2))
    with pytest.raises(OwnerQuarantined):
        pool.release(("transfer", 7))
    with pytest.raises(PoolExhausted):
        pool.allocate(2, ("request", 2))
    pool.release_quarantine(("transfer", 7))
    assert pool.free == 4
    assert pool.oldest_quarantine_age(now=99.0) == 0.0


def test_an_owner_may_have_nothing_and_lets_go_once() -> None:
    pool = PagePool(1)
    assert pool.allocate(0, "a") == []
    pool.release("a")
    with pytest.raises(UnknownOwner):
        pool.release("a")


def test_refusals_are_typed() -> None:
    pool = PagePool(2)
    pool.allocate(1, "a")
    with pytest.raises(PageNotHeld):
        pool.hold([0, 1], "b")
    with pytest.raises(InvalidKvArgument):
        pool.hold([2], "b")
    with pytest.raises(InvalidKvArgument):
        pool.allocate(-1, "b")
    with pytest.raises(OwnerNotQuarantined):
        pool.release_quarantine("a")
    with pytest.raises(UnknownOwner):
        pool.quarantine("b", "why", 0.0)
    with pytest.raises(UnknownOwner):
        pool.pages_of("b")
    with pytest.raises(InvalidKvArgument):
        PagePool(0)
    assert pool.owners == {"a"}


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps a set of owners for every page."""

    PAGES = 24
    owner = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.PAGES)
        self.holders: list[set[int]] = [set() for _ in range(self.PAGES)]
        self.known: set[int] = set()
        self.since: dict[int, float] = {}
        self.now = 0.0

    def free_pages(self) -> set[int]:
        return {page for page, holders in enumerate(self.holders) if not holders}

    def quarantined_pages(self) -> set[int]:
        return {page for page, holders in enumerate(self.holders) if holders & self.since.keys()}

    def drop(self, owner: int) -> None:
        self.known.discard(owner)
        for holders in self.holders:
            holders.discard(owner)

    @rule(owner=owner, count=st.integers(0, 10))
    def allocate(self, owner: int, count: int) -> None:
        free = self.free_pages()
        longest = self.pool.longest_free_run
        runs = self.pool.free_runs()
        if owner in self.since:
            with pytest.raises(OwnerQuarantined):
                self.pool.allocate(count, owner)
        elif count > len(free):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count, owner)
        else:
            pages = self.pool.allocate(count, owner)
            assert pages == sorted(set(pages)) and len(pages) == count
            assert set(pages) <= free
            if 0 < count <= longest:
                assert pages[-1] - pages[0] == count - 1
                best = min(len(run) for run in runs if len(run) >= count)
                assert any(pages[0] in run and len(run) == best for run in runs)
            self.known.add(owner)
            for page in pages:
                self.holders[page].add(owner)

    @rule(owner=owner, pages=st.sets(st.integers(0, PAGES - 1), max_size=4))
    def hold(self, owner: int, pages: set[int]) -> None:
        if owner in self.since:
            with pytest.raises(OwnerQuarantined):
                self.pool.hold(pages, owner)
        elif pages & (self.free_pages() | self.quarantined_pages()):
            with pytest.raises((PageNotHeld, PageQuarantined)):
                self.pool.hold(pages, owner)
        else:
            self.pool.hold(pages, owner)
            self.known.add(owner)
            for page in pages:
                self.holders[page].add(owner)

    @rule(owner=owner)
    def release(self, owner: int) -> None:
        if owner in self.since:
            with pytest.raises(OwnerQuarantined):
                self.pool.release(owner)
        elif owner not in self.known:
            with pytest.raises(UnknownOwner):
                self.pool.release(owner)
        else:
            self.pool.release(owner)
            self.drop(owner)

    @rule(owner=owner, later=st.floats(0, 10))
    def quarantine(self, owner: int, later: float) -> None:
        self.now += later
        if owner in self.since:
            with pytest.raises(OwnerQuarantined):
                self.pool.quarantine(owner, "test", self.now)
        elif owner not in self.known:
            with pytest.raises(UnknownOwner):
                self.pool.quarantine(owner, "test", self.now)
        else:
            self.pool.quarantine(owner, "test", self.now)
            self.since[owner] = self.now

    @precondition(lambda self: self.since)
    @rule(data=st.data())
    def release_quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.since)))
        self.pool.release_quarantine(owner)
        del self.since[owner]
        self.drop(owner)

    @invariant()
    def accounts_are_exact(self) -> None:
        free, quarantined = self.free_pages(), self.quarantined_pages()
        assert self.pool.free == len(free)
        assert self.pool.quarantined == len(quarantined)
        assert self.pool.free + self.pool.held + self.pool.quarantined == self.pool.total == self.PAGES
        assert self.pool.owners == self.known
        for owner in self.known:
            assert self.pool.pages_of(owner) == [page for page, who in enumerate(self.holders) if owner in who]

    @invariant()
    def free_runs_are_maximal(self) -> None:
        runs = self.pool.free_runs()
        assert {page for run in runs for page in run} == self.free_pages()
        assert all(left.stop < right.start for left, right in pairwise(runs))

    @invariant()
    def age_is_that_of_the_oldest(self) -> None:
        oldest = min(self.since.values(), default=self.now)
        assert self.pool.oldest_quarantine_age(self.now) == self.now - oldest

    def teardown(self) -> None:
        for owner in list(self.since):
            self.pool.release_quarantine(owner)
            self.known.discard(owner)
        for owner in self.known:
            self.pool.release(owner)
        assert self.pool.free_runs() == [range(self.PAGES)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40)
