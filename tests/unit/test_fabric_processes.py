"""Two processes, one of which is killed or stopped while bytes are in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton_fabric._native import InboxFull, PeerFailed, TransferDone, TransferFailed
from fabric_harness import LARGE_PAGE, Pair, fabrics, make_side, pair, wait_until

PROVIDERS = fabrics("tcp", "shm", "local")
Open = Callable[..., Any]


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(provider: str) -> Iterator[Open]:
    """Opens a pair of 64 large pages for this test, with a child as the receiver or the sender."""
    with ExitStack() as stack:

        def open_pair(remote: str, post_timeout_ms: int = 5000) -> Pair:
            context: AbstractContextManager[Pair] = pair(
                provider, remote=remote, layers=2, pages=32, page_bytes=LARGE_PAGE, post_timeout_ms=post_timeout_ms
            )
            both = stack.enter_context(context)
            both.sender.fill()
            return both

        yield open_pair


def start_all(both: Pair, steps: int = 1) -> list[int]:
    """Transfers of everything, ready to go, and their first bytes at the receiver."""
    pages = list(range(both.sender.pages))
    transfers = [both.open(pages, pages) for _ in range(steps)]
    for step, transfer in enumerate(transfers):
        both.run_step(step)
        both.sender.engine.submit_chunks([(transfer, step * both.sender.layers, 0, len(pages), True)])
    wait_until(lambda: bool(both.receiver.bytes[0, 0, 0]), "the first byte arrives")
    return transfers


def test_bytes_cross_between_two_processes(opened: Open) -> None:
    for remote in ("receiver", "sender"):
        both = opened(remote)
        start_all(both)
        both.sender.wait(TransferDone)
        both.receiver.wait(InboxFull)
        assert (both.receiver.bytes == both.sender.bytes).all()


def test_a_killed_receiver_fails_its_transfers_at_once(opened: Open, provider: str) -> None:
    both = opened("receiver")
    unplanned = both.open([0], [0])
    transfers = start_all(both, steps=3)
    both.receiver.signal(signal.SIGKILL)
    killed = time.monotonic()
    (peer,) = both.sender.wait(PeerFailed)
    assert time.monotonic() - killed < 2.0  # far below the post timeout
    assert peer.peer == both.peer
    ended = both.sender.wait(TransferFailed, TransferDone, count=4)
    assert sorted(each.transfer for each in ended) == sorted([unplanned, *transfers])
    assert {each.reason for each in ended if isinstance(each, TransferFailed)} == {peer.reason}
    failed = {each.transfer: each for each in ended if isinstance(each, TransferFailed)}
    assert failed[unplanned].quiesced
    assert not all(each.quiesced for each in failed.values())
    assert both.sender.metric("writes_in_flight") == both.sender.metric("transfers") == 0
    both.sender.engine.deregister_region(both.sender.region)  # nothing reads it any more

    # The survivor serves the next receiver.
    shape = {"layers": 2, "pages": 32, "page_bytes": LARGE_PAGE}
    successor = make_side(provider, remote=True, **shape)
    both.sender.region, _ = both.sender.engine.register_region(both.sender.memory.fd, both.sender.memory.length)
    both.receiver.close()
    both.receiver = successor
    both.connect()
    step = both.sender.layer_counter.value() // both.sender.layers
    again = both.open([1], [2])
    both.sender.engine.submit_chunks([(again, step * both.sender.layers, 0, 1, True)])
    both.run_step(step)
    both.receiver.wait(InboxFull)
    assert (both.receiver.bytes[:, 2] == both.sender.bytes[:, 1]).all()


def test_a_stopped_receiver_fails_its_transfers_in_time_and_cannot_be_written_after_its_fence(
    opened: Open, provider: str
) -> None:
    both = opened("receiver", post_timeout_ms=1000)
    start_all(both, steps=3)
    both.receiver.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    if provider == "verbs":
        # A device goes on without its process, as long as that has left it receives for the immediates.
        both.sender.wait(TransferDone, TransferFailed, count=3)
    else:
        (peer,) = both.sender.wait(PeerFailed)
        assert 0.5 < time.monotonic() - stopped < 5.0
        assert peer.reason in ("WRITE_TIMEOUT", "POST_TIMEOUT")
        ended = both.sender.wait(TransferFailed, TransferDone, count=3)
        assert any(isinstance(each, TransferFailed) and not each.quiesced for each in ended)
    both.receiver.signal(signal.SIGCONT)
    both.receiver.engine.close_endpoint(both.endpoint)
    landed = both.receiver.bytes.copy()
    # It lives, and takes the next transfer; nothing of the old ones comes.
    both.connect()
    transfer = both.open([1], [1], generation=9)
    both.sender.engine.submit_chunks([(transfer, 0, 0, 1, True)])
    both.receiver.wait(InboxFull)
    landed[:, 1] = both.sender.bytes[:, 1]
    assert (both.receiver.bytes == landed).all()


def test_a_killed_sender_leaves_a_receiver_that_can_fence_itself(opened: Open, provider: str) -> None:
    both = opened("sender")
    start_all(both, steps=3)
    both.sender.signal(signal.SIGKILL)
    both.sender.process.wait(20)
    dropped = both.receiver.engine.close_endpoint(both.endpoint)
    landed = both.receiver.bytes.copy()
    assert (3, 0) in dropped
    successor = make_side(provider, remote=True, layers=2, pages=32, page_bytes=LARGE_PAGE)
    successor.fill(7)
    both.sender.close()
    both.sender = successor
    both.connect()
    transfer = both.open([5], [6], generation=1)
    both.run_step(0)
    both.sender.engine.submit_chunks([(transfer, 0, 0, 1, True)])
    both.receiver.wait(InboxFull)
    landed[:, 6] = both.sender.bytes[:, 5]
    assert (both.receiver.bytes == landed).all()


def test_a_stopped_sender_writes_nothing_more_after_the_fence(opened: Open) -> None:
    both = opened("sender", post_timeout_ms=1500)
    transfers = start_all(both, steps=3)
    both.sender.signal(signal.SIGSTOP)
    both.receiver.engine.close_endpoint(both.endpoint)
    landed = both.receiver.bytes.copy()
    both.sender.signal(signal.SIGCONT)
    ended = both.sender.wait(TransferFailed, TransferDone, count=3)
    assert sorted(each.transfer for each in ended) == transfers
    assert (both.receiver.bytes == landed).all()
    assert both.receiver.metric("inboxes") == 0


def test_a_sender_that_was_stopped_itself_blames_nobody(opened: Open) -> None:
    both = opened("sender", post_timeout_ms=1500)
    start_all(both)
    both.sender.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped + 2.5, "more than the timeout passes")
    both.sender.signal(signal.SIGCONT)
    both.sender.wait(TransferDone)
    both.receiver.wait(InboxFull)
    assert (both.receiver.bytes == both.sender.bytes).all()


@pytest.mark.parametrize("ending", [signal.SIGABRT, signal.SIGTERM])
def test_a_process_that_dies_of_a_signal_says_so_and_leaves_no_file(tmp_path: Path, ending: signal.Signals) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "IPATH_NO_BACKTRACE"}
    program = f"import baton_fabric._native, signal; signal.raise_signal({int(ending)})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == -ending
    assert not list(tmp_path.iterdir())
