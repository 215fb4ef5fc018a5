import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv.pool import PagePool
from baton_worker.errors import EngineUnavailable, ExceedsPagePool, QueueFull, ReservationTimeout
from baton_worker.reservation import PageReserver
from conditions import settle

PAGES = 10


class Reservations(RuleBasedStateMachine):
    """Any interleaving of requests, grants, cancellations and releases, against a queue kept by hand."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._create())
        self.tasks = {}
        self.counts = {}
        self.queue = []
        self.holding = set()
        self.number = 0

    async def _create(self):
        self.reserver = PageReserver(PagePool(PAGES), max_waiting=4)

    def teardown(self):
        for task in self.tasks.values():
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self.tasks.values(), return_exceptions=True))
        for owner in list(self.holding | set(self.reserver.pool.owners)):
            if owner in self.reserver.pool.owners:
                self.reserver.release(owner)
        assert self.reserver.pool.free == PAGES
        self.loop.close()

    def _serve(self):
        while self.queue and self.counts[self.queue[0]] <= PAGES - sum(self.counts[owner] for owner in self.holding):
            self.holding.add(self.queue.pop(0))

    def _run(self):
        self.loop.run_until_complete(settle(6))

    @rule(count=st.integers(0, PAGES))
    def reserve(self, count):
        self.number += 1
        owner = self.number
        self.counts[owner] = count
        self.tasks[owner] = self.loop.create_task(self.reserver.reserve(owner, count, None))
        self._run()
        if len(self.queue) == 4:
            with pytest.raises(QueueFull):
                self.tasks[owner].result()
        else:
            self.queue.append(owner)
            self._serve()

    @precondition(lambda self: self.holding)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        self._release(pick)
        self._serve()

    @precondition(lambda self: self.queue)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick):
        self._cancel(pick)
        self._serve()

    @precondition(lambda self: self.queue and self.holding)
    @rule(leaving=st.integers(0, 99), waiting=st.integers(0, 99), first=st.booleans())
    def release_and_cancel_in_one_tick(self, leaving, waiting, first):
        """Whether the one that is cancelled was granted its pages before or not: it holds nothing in the end."""
        if first:
            cancelled = self._cancel(waiting)
            self._release(leaving)
        else:
            self._release(leaving)
            cancelled = self._cancel(waiting)
        self._run()
        assert self.tasks[cancelled].cancelled()
        self._serve()

    def _release(self, pick):
        owner = sorted(self.holding)[pick % len(self.holding)]
        self.reserver.release(owner)
        self.holding.discard(owner)

    def _cancel(self, pick):
        owner = self.queue.pop(pick % len(self.queue))
        self.tasks[owner].cancel()
        return owner

    @invariant()
    def first_come_first_served_and_nothing_lost(self):
        self._run()
        assert self.reserver.waiting == len(self.queue)
        assert self.reserver.pool.free == PAGES - sum(self.counts[owner] for owner in self.holding)
        assert self.reserver.pool.owners == self.holding
        for owner in self.holding:
            assert len(self.tasks[owner].result().pages) == self.counts[owner]


TestReservations = Reservations.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=30)


async def test_what_can_never_be_held_is_refused_at_once():
    reserver = PageReserver(PagePool(4), 8)
    with pytest.raises(ExceedsPagePool) as caught:
        await reserver.reserve("a", 5, None)
    assert caught.value.fields == {"pages": "5", "total": "4"}
    assert caught.value.status == "INVALID_ARGUMENT"


async def test_a_wait_that_takes_too_long_holds_nothing_and_lets_the_next_one_pass():
    reserver = PageReserver(PagePool(4), 8)
    await reserver.reserve("a", 3, None)
    large = asyncio.create_task(reserver.reserve("large", 4, 0))
    small = asyncio.create_task(reserver.reserve("small", 1, None))
    with pytest.raises(ReservationTimeout):
        await large
    assert len((await small).pages) == 1
    assert reserver.pool.owners == {"a", "small"}


async def test_pages_granted_in_the_tick_of_the_timeout_are_not_lost():
    reserver = PageReserver(PagePool(2), 8)
    await reserver.reserve("a", 2, None)
    waiting = asyncio.create_task(reserver.reserve("b", 2, 0))
    await asyncio.sleep(0)  # it waits, and its timeout comes in the next round of the loop
    reserver.release("a")
    result = (await asyncio.gather(waiting, return_exceptions=True))[0]
    if isinstance(result, ReservationTimeout):
        assert reserver.pool.free == 2
    else:
        assert result.pages == (0, 1)


async def test_a_small_request_does_not_overtake_a_large_one():
    reserver = PageReserver(PagePool(4), 8)
    await reserver.reserve("a", 2, None)
    large = asyncio.create_task(reserver.reserve("large", 4, None))
    small = asyncio.create_task(reserver.reserve("small", 1, None))
    await settle()
    assert not small.done()
    reserver.release("a")
    assert len((await large).pages) == 4
    assert not small.done()
    reserver.release("large")
    await small


async def test_an_end_of_quarantine_serves_who_waits():
    reserver = PageReserver(PagePool(2), 8)
    await reserver.reserve("a", 2, None)
    reserver.quarantine("a", "closing_inbox")
    waiting = asyncio.create_task(reserver.reserve("b", 1, None))
    await settle()
    assert reserver.pool.quarantined == 2
    reserver.release_quarantine("a")
    assert len((await waiting).pages) == 1


async def test_when_the_cache_is_gone_nobody_waits_for_it():
    reserver = PageReserver(PagePool(2), 8)
    await reserver.reserve("a", 2, None)
    waiting = [asyncio.create_task(reserver.reserve(owner, 1, None)) for owner in "bc"]
    await settle()
    waiting[1].cancel()
    reserver.close("the engine failed: it is gone")
    with pytest.raises(EngineUnavailable, match="it is gone"):
        await waiting[0]
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    with pytest.raises(EngineUnavailable):
        await reserver.reserve("d", 1, None)
    reserver.release("a")
    assert reserver.pool.free == 2
