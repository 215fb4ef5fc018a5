"""How a service process runs until it is told to end."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def first_to_end(*joins: Awaitable[object]) -> None:
    """Until one of them ends; raises what it raised. The others are cancelled."""
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(join) for join in joins]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def hold_stop_signals() -> None:
    """SIGINT and SIGTERM wait until `serve_until_signalled`: for a process that is not ready yet to end well.

    The threads that native libraries start meanwhile never take them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


async def serve_until_signalled(*failures: Awaitable[object]) -> signal.Signals | None:
    """Waits for SIGINT or SIGTERM, or for the first of ``failures`` (a supervisor's ``join()``, say) to end.

    Returns the signal, or None if an awaitable ended without error; raises what it raised. After a signal the
    awaitables are cancelled, wherever they are: starting belongs to what is awaited. A second signal ends the process
    at once, so that a shutdown which hangs can be broken off by hand. Must run in the main thread.
    """
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if signalled.done():
            logger.warning("second %s: ending at once", number.name)
            os._exit(128 + number)
        logger.info("%s: shutting down", number.name)
        signalled.set_result(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(failure) for failure in failures]
    try:
        everything: set[asyncio.Future[Any]] = {signalled, *tasks}
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        return signalled.result() if signalled.done() else None
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if signalled.done() and isinstance(result, Exception):
                logger.error("while shutting down", exc_info=result)


@contextmanager
def keeping_stop_signals() -> Iterator[None]:
    """Undoes what a native library does to the handlers of SIGINT and SIGTERM while it initialises itself.

    libfabric's shm provider, for one, installs its own, which end the process with status 1, or take a lock that the
    interrupted thread may hold: a process told to end while it initialised hung for ever (4 of 25 times, with two
    agents starting on one CPU). So the signals wait as well. A thread that is to initialise the library must be
    started within, so that it does not take them either.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
