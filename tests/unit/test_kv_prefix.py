"""Prefixes that are kept: what is found again, what goes first, and that nothing wrong is ever offered."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv.errors import InvalidKvArgument
from baton_kv.pool import PageNotHeld, PagePool, PoolExhausted
from baton_kv.prefix import PageChain, chain_root

ROOT = chain_root({"fingerprint": "f00d", "page_size": 2})
PAGE = 2


def keys(*tokens: int, root: bytes = ROOT) -> list[bytes]:
    return PageChain(root, PAGE, tokens).keys


def finished(pool: PagePool, owner: str, *tokens: int) -> list[int]:
    """A request whose full pages are kept when it ends; its pages."""
    pages = pool.allocate(-(-len(tokens) // PAGE), owner)
    wanted = keys(*tokens)
    pool.keep(wanted, pages[: len(wanted)])
    pool.release(owner)
    return pages


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_the_hash_of_the_one_before_and_of_its_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<2I", 7, 70_000)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 1, 2)).digest()
    assert keys(7, 70_000, 1, 2, 9) == [first, second]


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9)), st.integers(1, 5))
def test_a_chain_grows_as_if_it_had_been_made_at_once(parts: list[list[int]], page_size: int) -> None:
    tokens = [token for part in parts for token in part]
    chain = PageChain(ROOT, page_size)
    for part in parts:
        chain.extend(part)
    assert chain.keys == PageChain(ROOT, page_size, tokens).keys
    assert chain.tokens == len(tokens) and len(chain.keys) == len(tokens) // page_size


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_keys_are_equal_as_far_as_all_tokens_before_are(left: list[int], right: list[int]) -> None:
    for index, (a, b) in enumerate(zip(keys(*left), keys(*right), strict=False)):
        end = (index + 1) * PAGE
        assert (a == b) == (left[:end] == right[:end])


@pytest.mark.parametrize(
    ("identity", "salt"),
    [({"fingerprint": "beef", "page_size": 2}, ""), ({"fingerprint": "f00d", "page_size": 4}, ""), ({}, "mine")],
)
def test_another_model_layout_or_salt_shares_nothing(identity: dict[str, str | int], salt: str) -> None:
    root = chain_root(identity or {"fingerprint": "f00d", "page_size": 2}, salt)
    assert not set(keys(1, 2, 3, 4, root=root)) & set(keys(1, 2, 3, 4))


def test_a_page_has_at_least_one_token() -> None:
    with pytest.raises(InvalidKvArgument):
        PageChain(ROOT, 0)


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_after_its_request_has_ended_and_counts_as_free() -> None:
    pool = PagePool(8)
    pages = finished(pool, "a", 1, 2, 3, 4, 5)
    assert (pool.free, pool.kept, pool.held) == (8, 2, 0)
    assert pool.match(keys(1, 2, 3, 4, 5, 6)) == pages[:2]
    assert pool.match(keys(1, 2, 9, 9)) == pages[:1]
    assert pool.match(keys(9, 9, 3, 4)) == []


def test_while_somebody_holds_it_a_prefix_is_shared_and_not_given_away() -> None:
    pool = PagePool(4)
    shared = finished(pool, "a", 1, 2, 3, 4)
    assert pool.allocate(1, "b", pool.match(keys(1, 2, 3, 4))) == [2]
    assert pool.allocate(0, "c", pool.match(keys(1, 2))) == []
    pool.release("b")
    assert pool.pages_of("c") == shared[:1] and pool.free == 3
    assert sorted(pool.allocate(3, "d")) == [1, 2, 3]
    assert pool.match(keys(1, 2, 3, 4)) == shared[:1]


def test_pages_that_are_not_kept_go_first_then_the_least_recently_used() -> None:
    pool = PagePool(6)
    old = finished(pool, "a", 1, 1)
    new = finished(pool, "b", 2, 2)
    assert (pool.match(keys(1, 1)), pool.match(keys(2, 2))) == (old, new)
    assert not set(pool.allocate(4, "c")) & {*old, *new} and pool.evicted == 0
    assert pool.allocate(1, "d") == old and pool.evicted == 1
    assert (pool.match(keys(1, 1)), pool.match(keys(2, 2))) == ([], new)


def test_pages_that_are_neighbours_are_worth_a_few_kept_ones() -> None:
    pool = PagePool(8)
    for number in range(4):
        # A page that is kept, and one that is not.
        pool.keep(keys(number, number), pool.allocate(2, number)[:1])
    for number in range(4):
        pool.release(number)
    assert pool.free_runs() == [range(1, 2), range(3, 4), range(5, 6), range(7, 8)]
    assert pool.allocate(2, "a") == [0, 1]
    assert [pool.match(keys(number, number)) for number in range(4)] == [[], [], [4], [6]]


def test_use_makes_a_prefix_the_last_to_go() -> None:
    pool = PagePool(2)
    first, second = finished(pool, "a", 1, 1), finished(pool, "b", 2, 2)
    pool.allocate(0, "c", pool.match(keys(1, 1)))
    pool.release("c")
    assert pool.allocate(1, "d") == second
    assert pool.match(keys(1, 1)) == first


def test_a_prefix_goes_from_its_end_so_that_what_is_left_can_be_found() -> None:
    pool = PagePool(4)
    pages = finished(pool, "a", 1, 2, 3, 4, 5, 6, 7, 8)
    assert pool.allocate(2, "b") == pages[2:]
    assert pool.match(keys(1, 2, 3, 4, 5, 6)) == pages[:2]


def test_a_branch_goes_before_the_stem_even_if_it_was_used_later() -> None:
    pool = PagePool(4)
    twins = [pool.allocate(1, "a"), pool.allocate(2, "b")]
    pool.keep(keys(1, 1), twins[0])
    pool.release("a")
    # The same beginning, computed again at the same time: the first stays, and what follows hangs on it.
    assert pool.keep(keys(1, 1, 2, 2), twins[1]) == 1
    assert pool.match(keys(1, 1, 2, 2)) == [twins[0][0], twins[1][1]]
    pool.release("b")
    assert (pool.free, pool.kept) == (4, 2)
    pool.allocate(3, "c")
    assert pool.match(keys(1, 1, 2, 2)) == twins[0]


def test_a_stem_that_must_go_takes_held_branches_out_of_the_index_but_not_from_their_owner() -> None:
    pool = PagePool(3)
    stem = pool.allocate(1, "a")
    branch = pool.allocate(2, "b")
    pool.keep(keys(1, 1), stem)
    pool.keep(keys(1, 1, 2, 2), branch)
    pool.release("a")
    assert pool.allocate(1, "c") == stem
    assert pool.pages_of("b") == branch and pool.kept == 0
    pool.release("b")
    assert pool.free == 2


def test_a_second_copy_is_freed_and_the_first_stays() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(1, "a"), pool.allocate(1, "b")
    assert (pool.keep(keys(1, 1), first), pool.keep(keys(1, 1), second), pool.keep(keys(1, 1), first)) == (1, 0, 0)
    pool.release("a")
    pool.release("b")
    assert pool.match(keys(1, 1)) == first
    assert pool.free_runs() == [range(second[0], second[0] + 1)]


def test_what_does_not_fit_beside_the_prefix_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4)
    prefix = finished(pool, "a", 1, 1, 2, 2)
    assert (pool.available(prefix), pool.available(prefix[:1]), pool.available()) == (2, 3, 4)
    with pytest.raises(PoolExhausted) as refused:
        pool.allocate(3, "b", prefix)
    assert (refused.value.requested, refused.value.free) == (3, 2)
    assert pool.owners == set() and pool.match(keys(1, 1, 2, 2)) == prefix


def test_a_page_in_quarantine_is_not_kept_nor_anything_after_it() -> None:
    pool = PagePool(6)
    first = finished(pool, "a", 1, 1, 2, 2, 3, 3)
    pool.allocate(0, ("transfer", 1), first[1:2])
    pool.allocate(0, "reader", first[:2])
    pool.quarantine(("transfer", 1), "silent", now=0.0)
    assert pool.match(keys(1, 1, 2, 2, 3, 3)) == first[:1]
    assert (pool.free, pool.quarantined, pool.held) == (4, 1, 1)
    assert pool.keep(keys(1, 1, 2, 2), first[:2]) == 0
    pool.release_quarantine(("transfer", 1))
    assert pool.keep(keys(1, 1, 2, 2), first[:2]) == 1
    pool.release("reader")
    assert pool.free == 6


def test_only_what_somebody_holds_can_be_kept_and_only_as_one_thing() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2, "a")
    for wanted, offered in ((keys(1, 1), [3]), (keys(1, 1), [4]), (keys(1, 1), pages), (keys(1, 1, 2, 2), [0, 0])):
        with pytest.raises((PageNotHeld, InvalidKvArgument)):
            pool.keep(wanted, offered)
    pool.keep(keys(1, 1), pages[:1])
    with pytest.raises(InvalidKvArgument, match="can't be"):
        pool.keep(keys(2, 2), pages[:1])
    assert pool.kept == 1


@dataclass
class Request:
    """tokens: of its full pages and of the one that it writes; written: how many of them are in the pages."""

    tokens: tuple[int, ...]
    pages: list[int]
    prefix: int
    written: int


class PrefixMachine(RuleBasedStateMachine):
    """Requests that share beginnings come, write, are kept, go into quarantine and end, over a pool that is too small.

    The model knows the bytes: `holds[page]` is the tokens from the start on that the page's entries belong to, as they
    were last written. What the pool offers must be exactly that.
    """

    PAGES = 10

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.PAGES)
        self.holds: list[tuple[int, ...] | None] = [None] * self.PAGES
        self.requests: dict[int, Request] = {}
        self.quarantined: dict[int, Request] = {}
        # Pages in the order in which they were last let go.
        self.let_go: list[int] = []
        self.next = 0

    def held(self) -> set[int]:
        return {page for request in self.everybody() for page in request.pages}

    def everybody(self) -> list[Request]:
        return [*self.requests.values(), *self.quarantined.values()]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.requests)))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), more=st.integers(0, 3))
    def admit(self, tokens: list[int], more: int) -> None:
        count = -(-(len(tokens) + more) // PAGE)
        wanted = keys(*tokens[:-1])
        prefix = self.pool.match(wanted)
        for index, page in enumerate(prefix):
            assert self.holds[page] == tuple(tokens[: (index + 1) * PAGE]), "never another's, never half-written"
        free_before, held_before = self.pool.free, self.held()
        fits = len(set(range(self.PAGES)) - held_before - set(prefix)) >= count - len(prefix)
        if not fits:
            assert self.pool.available(prefix) < count - len(prefix)
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count - len(prefix), self.next, prefix)
            assert self.pool.free == free_before and self.pool.match(wanted) == prefix
            return
        kept_before = {page for page in range(self.PAGES) if page not in held_before and self.is_kept(page)}
        strictly_free_pages = set(range(self.PAGES)) - held_before - kept_before
        strictly_free = len(strictly_free_pages)
        own = self.pool.allocate(count - len(prefix), self.next, prefix)
        assert not set(own) & (held_before | set(prefix)), "nobody's pages are given away"
        gone = {page for page in kept_before if not self.is_kept(page)}
        needed = max(0, len(own) - strictly_free)
        assert needed <= len(gone) <= needed + 2 * len(own), "as many as needed, and for the sake of runs a few"
        assert set(own) <= gone | strictly_free_pages
        self.check_order(gone, kept_before - set(prefix))
        for page in own:
            self.holds[page] = None
        self.requests[self.next] = Request(tuple(tokens), prefix + own, len(prefix), len(prefix) * PAGE)
        self.next += 1

    def is_kept(self, page: int) -> bool:
        return self.pool.key_of(page) is not None

    def check_order(self, gone: set[int], others: set[int]) -> None:
        """What was left is younger than what went, or it is the stem of something that was there to go."""
        contents = {page: self.holds[page] or () for page in others}
        for left in others - gone:
            stem = contents[left]
            if not any(page != left and contents[page][: len(stem)] == stem for page in others):
                assert all(self.let_go.index(page) < self.let_go.index(left) for page in gone)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4))
    def write(self, data: st.DataObject, count: int) -> None:
        """A forward step: each position goes into a page that no one else may read."""
        request = self.requests[self.pick(data)]
        for position in range(request.written, min(request.written + count, len(request.tokens))):
            page = request.pages[position // PAGE]
            assert sum(page in other.pages for other in self.everybody()) == 1, "what is written is private"
            assert not self.is_kept(page)
            self.holds[page] = request.tokens[: position + 1]
            request.written = position + 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.keep_what_is_written(self.requests[self.pick(data)])

    def keep_what_is_written(self, request: Request) -> None:
        wanted = keys(*request.tokens[: request.written])
        self.pool.keep(wanted, request.pages[: len(wanted)])
        self.note_release(self.pool.match(wanted))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        owner = self.pick(data)
        request = self.requests[owner]
        if keep:
            self.keep_what_is_written(request)
        del self.requests[owner]
        self.pool.release(owner)
        self.note_release(request.pages)

    def note_release(self, pages: list[int]) -> None:
        """These were in use until now; those that nobody holds any more are the last to go, from their end on."""
        for page in reversed(pages):
            if page not in self.held():
                self.let_go = [other for other in self.let_go if other != page] + [page]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.quarantined[owner] = self.requests.pop(owner)
        self.pool.quarantine(owner, "test", 0.0)
        assert not any(self.is_kept(page) for page in self.quarantined[owner].pages)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.quarantined)))
        request = self.quarantined.pop(owner)
        self.pool.release_quarantine(owner)
        self.note_release(request.pages)

    @invariant()
    def accounts_are_exact(self) -> None:
        held = self.held()
        assert self.pool.free == self.PAGES - len(held)
        assert self.pool.free + self.pool.held + self.pool.quarantined == self.PAGES
        strictly_free = {page for run in self.pool.free_runs() for page in run}
        kept = {page for page in range(self.PAGES) if self.is_kept(page)}
        assert not strictly_free & (held | kept) and len(kept) == self.pool.kept
        assert strictly_free | held | kept == set(range(self.PAGES)), "no page is lost"

    @invariant()
    def what_is_kept_can_be_found_from_its_start(self) -> None:
        for page in range(self.PAGES):
            if self.is_kept(page):
                contents = self.holds[page]
                assert contents is not None and len(contents) % PAGE == 0
                assert self.pool.match(keys(*contents))[-1] == page

    def teardown(self) -> None:
        for owner in list(self.quarantined):
            self.pool.release_quarantine(owner)
        for owner in list(self.requests):
            self.pool.release(owner)
        assert self.pool.free == self.PAGES
        assert sorted(self.pool.allocate(self.PAGES, "all")) == list(range(self.PAGES))
        assert self.pool.kept == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=150, stateful_step_count=40)
