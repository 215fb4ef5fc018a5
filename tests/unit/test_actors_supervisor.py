import asyncio
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_actors import (
    Actor,
    Deadline,
    DeadlineExceeded,
    RestartLimitExceeded,
    RestartPolicy,
    Supervisor,
    first_to_end,
    handles,
    hold_stop_signals,
    keeping_stop_signals,
    serve_until_signalled,
)

FAST = {"first": 0.0, "longest": 0.0}


class Fail:
    pass


class Worker(Actor):
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.number = type(self).made

    @handles
    async def fail(self, message: Fail) -> None:
        raise ValueError("worker broke")


@pytest.fixture
def worker_type():
    return type("Worker", (Worker,), {"made": 0})


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - any state, not an event
            await asyncio.sleep(0.001)


async def test_a_failed_child_is_replaced_and_the_others_are_left_alone(worker_type):
    supervisor = Supervisor()
    other = await supervisor.start("other", worker_type)
    first = await supervisor.start("worker", worker_type, RestartPolicy(**FAST))
    first.tell(Fail())
    await until(lambda: supervisor.child("worker") is not first)
    assert supervisor.child("worker").running
    assert supervisor.child("other") is other
    assert other.running
    await supervisor.stop()
    assert not other.running


async def test_the_limit_escalates_and_stops_the_rest(worker_type):
    supervisor = Supervisor()
    other = await supervisor.start("other", worker_type)
    first = await supervisor.start("worker", worker_type, RestartPolicy(limit=1, **FAST))
    joined = asyncio.ensure_future(supervisor.join())
    first.tell(Fail())
    await until(lambda: supervisor.child("worker") is not first)
    supervisor.child("worker").tell(Fail())
    with pytest.raises(RestartLimitExceeded) as caught:
        await asyncio.wait_for(joined, 5)
    assert caught.value.fields["child"] == "worker"
    assert not other.running
    await supervisor.stop()


async def test_a_successor_that_does_not_start_counts_as_a_restart():
    attempts = []

    class Fragile(Worker):
        async def on_start(self):
            attempts.append(self.number)
            if 1 < len(attempts) < 4:
                raise OSError("not yet")

    supervisor = Supervisor()
    first = await supervisor.start("worker", Fragile, RestartPolicy(limit=3, **FAST))
    first.tell(Fail())
    await until(lambda: len(attempts) == 4)
    await until(lambda: supervisor.child("worker").running)
    await supervisor.stop()


async def test_a_factory_that_raises_counts_as_a_restart():
    made = []

    def factory():
        made.append(None)
        if len(made) in (2, 3):
            raise OSError("nothing to make it of yet")
        return Worker()

    supervisor = Supervisor()
    first = await supervisor.start("worker", factory, RestartPolicy(limit=3, **FAST))
    first.tell(Fail())
    await until(lambda: len(made) == 4 and supervisor.child("worker") is not first)
    assert supervisor.child("worker").running
    await supervisor.stop()


async def test_a_factory_that_goes_on_raising_escalates(worker_type):
    made = []

    def factory():
        made.append(None)
        if len(made) > 1:
            raise OSError("no room")
        return Worker()

    supervisor = Supervisor()
    other = await supervisor.start("other", worker_type)
    first = await supervisor.start("worker", factory, RestartPolicy(limit=2, **FAST))
    first.tell(Fail())
    with pytest.raises(RestartLimitExceeded, match="no room"):
        await asyncio.wait_for(supervisor.join(), 5)
    assert len(made) == 3 and not other.running


async def test_the_first_start_is_the_callers():
    class Fragile(Worker):
        async def on_start(self):
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await Supervisor().start("worker", Fragile)


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(0, 5), st.floats(0.1, 50))
def test_restarts_within_the_period_never_pass_the_limit(gaps, limit, period):
    policy = RestartPolicy(limit=limit, period=period, first=0.1, longest=2.0)
    now, granted = 0.0, []
    for gap in gaps:
        now += gap
        delay = policy.delay(now)
        if delay is not None:
            granted.append(now)
            assert 0.1 <= delay <= 2.0
        recent = sum(1 for at in granted if now - at <= period)
        assert recent <= limit
        assert delay is not None or recent == limit


@given(st.one_of(st.none(), st.floats(0, 1e6)), st.one_of(st.none(), st.floats(0, 1e6)), st.floats(0, 1e6))
def test_a_limited_deadline_is_the_earlier_one(first, second, later):
    clock = [0.0]
    deadline = Deadline.after(first, lambda: clock[0]).limited(second)
    finite = [seconds for seconds in (first, second) if seconds is not None]
    clock[0] = later
    if finite:
        assert deadline.remaining() == pytest.approx(max(0.0, min(finite) - later))
        assert deadline.passed == (later >= min(finite))
    else:
        assert deadline.remaining() is None
        assert not deadline.passed


async def test_waiting_for_a_deadline():
    with pytest.raises(DeadlineExceeded, match="the answer: not done in time"):
        await Deadline.after(0.01).wait(asyncio.Event().wait(), "the answer")
    with pytest.raises(TimeoutError):  # another's timeout is not ours
        await Deadline.never().wait(asyncio.wait_for(asyncio.Event().wait(), 0.01))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serving_ends_with_a_signal(number):
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
    async with asyncio.timeout(5):
        assert await serve_until_signalled(asyncio.Event().wait()) is number


async def test_a_signal_that_came_before_is_held_until_then():
    cleaned_up = asyncio.Event()

    async def start():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()

    hold_stop_signals()
    # To this thread: the test's process may have others, which never held theirs.
    signal.raise_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        assert await serve_until_signalled(start()) is signal.SIGTERM
    assert cleaned_up.is_set()


async def test_serving_ends_with_a_failure():
    async def fail():
        raise ValueError("supervisor gave up")

    with pytest.raises(ValueError, match="gave up"):
        await serve_until_signalled(fail())


async def test_the_first_to_end_ends_them_all():
    other = asyncio.ensure_future(asyncio.Event().wait())

    async def fail():
        raise ValueError("the reaper broke")

    with pytest.raises(ValueError, match="reaper"):
        await first_to_end(other, fail())
    assert other.cancelled()


def test_a_librarys_signal_handlers_are_undone():
    before = signal.getsignal(signal.SIGTERM)
    with keeping_stop_signals():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) is before
