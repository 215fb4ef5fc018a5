"""Requests that wait for pages beside a prefix cache: what is granted, to whom first, and with which of the pages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv.pool import PagePool
from baton_kv.prefix import PageChain
from baton_worker.reservation import PageReserver, Reservation
from conditions import settle

PAGES = 10
PAGE = 2
ROOT = b"root"


@dataclass
class Request:
    tokens: tuple[int, ...]
    count: int
    task: asyncio.Task[Reservation]

    @property
    def chain(self) -> PageChain:
        return PageChain(ROOT, PAGE, self.tokens[:-1])


class PrefixReservations(RuleBasedStateMachine):
    """Any order of requests with a few beginnings in common, grants, keeping, releases, cancellations, quarantines."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.reserver = PageReserver(PagePool(PAGES), max_waiting=100)
        self.requests: dict[int, Request] = {}
        self.waiting: list[int] = []
        self.quarantined: set[int] = set()
        self.contents: dict[int, tuple[int, ...]] = {}
        self.next = 0

    def run(self) -> None:
        self.loop.run_until_complete(settle(6))
        while self.waiting and self.requests[self.waiting[0]].task.done():
            self.granted(self.requests[self.waiting.pop(0)])
        assert not any(self.requests[owner].task.done() for owner in self.waiting), "first come, first served"

    def granted(self, request: Request) -> None:
        reservation = request.task.result()
        assert len(set(reservation.pages)) == request.count
        for position, page in enumerate(reservation.pages):
            end = (position + 1) * PAGE
            if position < reservation.cached:
                assert self.contents[page] == request.tokens[:end], "complete, and the request's own beginning"
                assert end <= len(request.tokens) - 1, "the last token's page is nobody else's"
            else:
                self.contents[page] = request.tokens[:end]

    def held(self) -> set[int]:
        tasks = [request.task for owner, request in self.requests.items() if owner not in self.waiting]
        return {page for task in tasks for page in task.result().pages}

    def holding(self) -> list[int]:
        return sorted(self.requests.keys() - set(self.waiting) - self.quarantined)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), more=st.integers(0, 6))
    def reserve(self, tokens: list[int], more: int) -> None:
        owner, self.next = self.next, self.next + 1
        count = -(-(len(tokens) + more) // PAGE)
        chain = PageChain(ROOT, PAGE, tokens[:-1])
        task = self.loop.create_task(self.reserver.reserve(owner, count, None, chain))
        self.requests[owner] = Request(tuple(tokens), count, task)
        self.waiting.append(owner)
        self.run()

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        owner = data.draw(st.sampled_from(self.holding()))
        request = self.requests.pop(owner)
        if keep:
            self.reserver.keep(request.chain, request.task.result().pages, len(request.tokens))
        self.reserver.release(owner)
        self.run()

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(self.holding()))]
        self.reserver.keep(request.chain, request.task.result().pages, len(request.tokens))
        self.run()

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.holding()))
        pages = self.requests.pop(owner).task.result().pages
        self.reserver.forget(pages)
        assert not any(self.reserver.pool.key_of(page) for page in pages)
        self.reserver.release(owner)
        self.run()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(owner)
        self.requests.pop(owner).task.cancel()
        self.run()

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.holding()))
        self.reserver.quarantine(owner, "test")
        self.quarantined.add(owner)
        self.run()

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(owner)
        del self.requests[owner]
        self.reserver.release_quarantine(owner)
        self.run()

    @invariant()
    def nothing_is_lost_and_nobody_waits_for_what_is_there(self) -> None:
        pool = self.reserver.pool
        assert pool.free == PAGES - len(self.held())
        assert self.reserver.waiting == len(self.waiting)
        if self.waiting:
            first = self.requests[self.waiting[0]]
            prefix = pool.match(first.chain.keys)
            assert first.count - len(prefix) > pool.available(prefix)

    def teardown(self) -> None:
        for request in self.requests.values():
            request.task.cancel()
        self.loop.run_until_complete(settle(6))
        for owner in self.quarantined:
            self.reserver.release_quarantine(owner)
        for owner in self.reserver.pool.owners:
            self.reserver.release(owner)
        assert self.reserver.pool.free == PAGES
        self.loop.close()


TestPrefixReservations = PrefixReservations.TestCase
TestPrefixReservations.settings = settings(max_examples=60, stateful_step_count=30)
