import asyncio

import pytest

from baton_engine.errors import EngineError, SequenceInvalid
from baton_engine.messages import FinishReason
from baton_engine.scheduler import Finished, NewTokens, PrefillAdvanced, Scheduler, Sequence
from baton_kv.pool import PagePool, UnknownOwner
from baton_kv.prefix import PageChain
from baton_worker.engine_actor import MAX_FAILURES_IN_A_ROW, EngineActor, NoHooks
from baton_worker.errors import EngineUnavailable, StepFailed
from baton_worker.reservation import PageReserver
from conditions import settle, until
from fake_engine import FakeEngine


class Reserver(PageReserver):
    """Counts what is let go."""

    def __init__(self):
        super().__init__(PagePool(16), 8)
        self.released = []

    def release(self, owner):
        super().release(owner)
        self.released.append(owner)


class Hooks(NoHooks):
    def __init__(self):
        self.before, self.failed = [], []
        self.raises = None
        self.hold = None

    def before_step(self, plan):
        self.before.append(plan.step)
        if self.raises == "before":
            raise RuntimeError("a hook is broken")

    async def after_failed_step(self, plan):
        self.failed.append(plan.step)
        if self.raises == "after":
            raise RuntimeError("a hook is broken")
        if self.hold is not None:
            await self.hold.wait()


class Rig:
    def __init__(self, **engine):
        self.engine = FakeEngine(**engine)
        self.reserver = Reserver()
        self.hooks = Hooks()
        scheduler = Scheduler(chunk_tokens=8, max_batch=4, page_size=4)
        self.actor = EngineActor(self.engine, scheduler, self.reserver, self.hooks)

    async def submit(self, number, tokens=4, max_tokens=2, **options):
        pages = (await self.reserver.reserve(number, -(-(tokens + max_tokens) // 4), None)).pages
        return self.actor.submit(
            Sequence(number, tuple(range(tokens)), tuple(pages), max_tokens=max_tokens, **options), number
        )


@pytest.fixture
async def rig():
    rig = Rig()
    await rig.actor.start()
    yield rig
    await rig.actor.stop()


async def collect(stream):
    return [event async for event in stream]


async def test_a_sequence_gives_its_tokens_then_its_end_and_lets_go_of_its_pages(rig):
    rig.engine.automatic = True
    events = await collect(await rig.submit(1))
    assert [event.update for event in events] == [
        PrefillAdvanced(1, 4),
        NewTokens(1, (1,)),
        NewTokens(1, (1,)),
        Finished(1, FinishReason.LENGTH),
    ]
    assert all(event.step.compute_us == 5000 for event in events)
    assert rig.reserver.released == [1] and rig.reserver.pool.free == 16
    assert rig.actor.steps_done == 2 and rig.hooks.before == [0, 1]


async def test_cancelled_in_a_step_it_keeps_its_pages_until_the_step_ends(rig):
    stream = await rig.submit(1)
    await rig.engine.begun(0)
    rig.actor.cancel(1)
    await settle()
    assert rig.reserver.released == []
    rig.engine.finish()
    assert [event.update for event in await collect(stream)] == [Finished(1, FinishReason.CANCELLED)]
    assert rig.reserver.released == [1]


async def test_cancelled_between_steps_it_ends_at_once(rig):
    first = await rig.submit(1, tokens=8)
    await rig.engine.begun(0)
    second = await rig.submit(2)
    rig.actor.cancel(2)
    assert [event.update for event in await collect(second)] == [Finished(2, FinishReason.CANCELLED)]
    assert rig.reserver.released == [2]
    rig.engine.automatic = True
    rig.engine.finish()
    await collect(first)
    assert sorted(rig.reserver.released) == [1, 2]


async def test_cancelling_twice_or_after_the_end_is_nothing(rig):
    stream = await rig.submit(1)
    await rig.engine.begun(0)
    rig.actor.cancel(1)
    rig.actor.cancel(1)
    rig.actor.cancel(77)
    rig.engine.finish()
    await collect(stream)
    rig.actor.cancel(1)
    await settle()
    assert rig.reserver.released == [1] and rig.actor.running


async def test_cancelled_before_its_submission_was_handled(rig):
    stream = await rig.submit(1)
    rig.actor.cancel(1)
    await rig.engine.begun(0)
    rig.engine.finish()
    assert [event.update for event in await collect(stream)] == [Finished(1, FinishReason.CANCELLED)]
    assert rig.reserver.released == [1]


async def test_a_stop_tells_every_stream_once_also_those_that_still_wait_in_the_mailbox(rig):
    known = await rig.submit(1)
    await rig.engine.begun(0)
    waiting = await rig.submit(2)  # nothing has run since: its message is in the mailbox
    rig.actor.ending = "the engine failed: killed"
    await rig.actor.stop()
    errors = []
    for stream in (known, waiting):
        with pytest.raises(EngineUnavailable, match="killed") as caught:
            await asyncio.wait_for(collect(stream), 5)
        errors.append(caught.value)
        assert stream._events.empty()
    assert errors[0] is not errors[1]
    pages = (await rig.reserver.reserve(3, 1, None)).pages
    with pytest.raises(EngineUnavailable):
        rig.actor.submit(Sequence(3, (1,), tuple(pages)), 3)
    rig.reserver.release(3)  # a refused submission leaves the pages with their owner
    rig.actor.cancel(1)


async def test_a_failed_step_ends_its_sequences_and_the_next_begins_only_after_the_hook(rig):
    rig.hooks.hold = asyncio.Event()
    in_step = await rig.submit(1, tokens=8)
    await rig.engine.begun(0)
    other = await rig.submit(2)
    rig.engine.fail()
    await until(lambda: rig.hooks.failed == [0])
    await settle()
    assert len(rig.engine.plans) == 1 and rig.reserver.released == []
    rig.hooks.hold.set()
    with pytest.raises(StepFailed):
        await collect(in_step)
    assert rig.reserver.released == [1]
    rig.engine.automatic = True
    await rig.engine.begun(1)
    rig.engine.finish() if rig.engine.running else None
    assert (await collect(other))[-1].update.reason is FinishReason.LENGTH


async def test_cancelled_in_a_step_that_fails_it_ends_as_cancelled(rig):
    stream = await rig.submit(1)
    await rig.engine.begun(0)
    rig.actor.cancel(1)
    rig.engine.fail()
    assert [event.update for event in await collect(stream)] == [Finished(1, FinishReason.CANCELLED)]
    assert rig.reserver.released == [1]


async def test_what_a_failed_step_had_in_its_pages_is_offered_to_nobody_from_then_on(rig):
    prompt = tuple(range(9))
    chain = PageChain(b"root", 4, prompt[:-1])
    rig.engine.automatic = True
    pages = (await rig.reserver.reserve(1, 3, None, chain)).pages
    await collect(rig.actor.submit(Sequence(1, prompt, pages, max_tokens=1), 1, chain))
    assert rig.reserver.pool.match(chain.keys) == list(pages[:2])
    rig.engine.automatic = False
    rig.hooks.hold = asyncio.Event()
    reservation = await rig.reserver.reserve(2, 3, None, chain)
    stream = rig.actor.submit(Sequence(2, prompt, reservation.pages, computed=8, max_tokens=1), 2, chain)
    await until(lambda: rig.engine.running)
    rig.actor.cancel(2)
    rig.engine.fail()
    await until(lambda: rig.hooks.failed)
    # Also while the step's transfers are being ended, and though nobody waits for the sequence any more.
    assert rig.reserver.pool.match(chain.keys) == []
    rig.hooks.hold.set()
    assert [event.update for event in await collect(stream)] == [Finished(2, FinishReason.CANCELLED)]
    assert rig.reserver.pool.kept == 0 and rig.reserver.pool.free == 16


async def test_an_engine_of_which_every_step_fails_is_given_up(rig):
    async def fail(number):
        stream = await rig.submit(number)
        await until(lambda: rig.engine.running)
        rig.engine.fail()
        return stream

    for number in range(MAX_FAILURES_IN_A_ROW - 1):
        with pytest.raises(StepFailed):
            await collect(await fail(number))
    stream = await rig.submit(100, max_tokens=1)
    await until(lambda: rig.engine.running)
    rig.engine.finish()
    await collect(stream)
    for number in range(101, 100 + MAX_FAILURES_IN_A_ROW):
        with pytest.raises(StepFailed):
            await collect(await fail(number))
    assert rig.actor.running
    with pytest.raises(StepFailed):
        await collect(await fail(200))
    with pytest.raises(EngineError, match=f"{MAX_FAILURES_IN_A_ROW} steps in a row failed"):
        await asyncio.wait_for(rig.actor.join(), 5)


async def test_what_the_scheduler_refuses_is_told_to_its_stream_alone(rig):
    good = await rig.submit(1)
    await rig.engine.begun(0)
    pages = (await rig.reserver.reserve(2, 1, None)).pages
    refused = rig.actor.submit(Sequence(2, (1, 2), tuple(pages), max_tokens=50), 2)
    with pytest.raises(SequenceInvalid, match="it may write"):
        await collect(refused)
    assert rig.reserver.released == [2]
    rig.engine.automatic = True
    rig.engine.finish()
    assert (await collect(good))[-1].update.reason is FinishReason.LENGTH


async def test_an_id_in_use_is_refused_without_harm_to_its_owner(rig):
    stream = await rig.submit(1)
    with pytest.raises(SequenceInvalid):
        rig.actor.submit(Sequence(1, (1,), (0,)), 1)
    rig.engine.automatic = True
    assert (await collect(stream))[-1].update.reason is FinishReason.LENGTH


@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_hook_that_raises_fails_the_actor_and_every_stream(rig, where):
    streams = [await rig.submit(1)]
    await rig.engine.begun(0)
    streams.append(await rig.submit(2))
    await settle()
    rig.hooks.raises = where
    rig.engine.finish() if where == "before" else rig.engine.fail()
    with pytest.raises(RuntimeError, match="a hook is broken"):
        await asyncio.wait_for(rig.actor.join(), 5)
    for stream in streams:
        with pytest.raises(EngineUnavailable, match="a hook is broken"):
            await collect(stream)
    assert not rig.actor.running


async def test_a_step_that_ends_in_no_known_way_fails_the_actor(rig):
    stream = await rig.submit(1)
    await rig.engine.begun(0)
    rig.engine.fail(EngineError("the model process answered Attached"))
    with pytest.raises(EngineError, match="Attached"):
        await asyncio.wait_for(rig.actor.join(), 5)
    with pytest.raises(EngineUnavailable):
        await collect(stream)


async def test_a_result_that_is_not_the_steps_fails_the_actor(rig):
    stream = await rig.submit(1)
    plan = await rig.engine.begun(0)
    rig.engine.plans[-1] = type(plan)(7, plan.items)
    rig.engine.finish()
    with pytest.raises(EngineError):
        await asyncio.wait_for(rig.actor.join(), 5)
    with pytest.raises(EngineUnavailable):
        await collect(stream)


async def test_pages_are_let_go_exactly_once_whatever_the_order(rig):
    """Every way to end, side by side; a second release of an owner would raise."""
    rig.engine.automatic = True
    streams = [await rig.submit(number, tokens=number) for number in range(1, 9)]
    for number in (2, 4, 6):
        rig.actor.cancel(number)
    for stream in streams:
        assert isinstance((await collect(stream))[-1].update, Finished)
    assert sorted(rig.reserver.released) == list(range(1, 9))
    with pytest.raises(UnknownOwner):
        rig.reserver.release(1)
    assert rig.actor.running
