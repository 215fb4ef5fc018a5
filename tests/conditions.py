"""Waiting in tests: for a condition, with a deadline, and never for a time."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str = "the condition", timeout: float = 5.0) -> None:
    """Returns when `condition()` is true; fails after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {timeout:g} s") from None


async def settle(rounds: int = 20) -> None:
    """Lets everything run that can run without a clock or a socket."""
    for _ in range(rounds):
        await asyncio.sleep(0)
