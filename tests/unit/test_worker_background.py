import asyncio

import pytest

from baton_worker.background import BackgroundTasks, first_of
from conditions import settle


async def test_drain_waits_for_what_runs_and_for_what_that_spawns():
    background, done = BackgroundTasks(), []

    async def inner():
        await settle()
        done.append("inner")

    async def outer():
        await settle()
        background.spawn(inner(), "inner")
        done.append("outer")

    background.spawn(outer(), "outer")
    await background.drain(5)
    assert done == ["outer", "inner"] and len(background) == 0


async def test_drain_waits_for_attended_work_and_what_it_spawns_as_it_ends():
    background, done = BackgroundTasks(), []

    async def clean():
        await settle()
        done.append("clean")

    async def handler():
        with background.attended():
            try:
                await asyncio.Event().wait()
            finally:
                background.spawn(clean(), "clean-up")

    task = asyncio.create_task(handler())
    await settle()
    task.cancel()
    await background.drain(5)
    assert done == ["clean"]


async def test_drain_cancels_what_does_not_end_in_time():
    background = BackgroundTasks()
    task = background.spawn(asyncio.Event().wait(), "for ever")
    with background.attended():
        await background.drain(0.01)
    assert task.cancelled() and len(background) == 0


async def test_a_failure_is_logged(caplog):
    background = BackgroundTasks()

    async def fail():
        raise ValueError("the reason")

    task = background.spawn(fail(), "this work")
    with pytest.raises(ValueError):
        await task
    await settle()
    assert "this work failed" in caplog.text and "the reason" in caplog.text


async def test_waiting_for_the_first_cancels_none():
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    await first_of(first, second, timeout=0)
    waiting = asyncio.create_task(first_of(first, second))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not first.cancelled()
    second.set_result(1)
    await first_of(first, second)
    assert not first.done()
