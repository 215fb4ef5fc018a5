"""Waiting in tests: for a condition, with a deadline, and never for a time."""

import asyncio
import inspect
import os
from collections.abc import Callable

# Where a fabric is emulated, everything takes so many times longer.
SLOWNESS = float(os.environ.get("BATON_TEST_SLOWNESS", "1"))
DEADLINE_S = 10.0 * SLOWNESS
LONGEST_PAUSE_S = 0.05


async def until(condition: Callable[[], object], what: str = "the condition", timeout: float = DEADLINE_S) -> None:
    """Returns when `condition()`, or what it returns to be awaited, is true; fails after `timeout` seconds.

    For what nobody announces, such as the state of another process. Looks at once, at each turn of the loop, and then
    ever less often.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    pause = 0.0
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        assert loop.time() < end, f"{what} did not come true within {timeout:g} s"
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_S, pause + 0.001)


async def settle(rounds: int = 20) -> None:
    """Lets everything run that can run without a clock or a socket."""
    for _ in range(rounds):
        await asyncio.sleep(0)
