"""The fault layer: each fault over a real transport, and nothing where there is none."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton_fabric._native import InboxFull, PeerFailed, TransferCancelled, TransferDone, TransferFailed
from baton_fabric.faults import FaultPlan, FaultRule, FaultsInvalid, parse_faults
from fabric_harness import Pair, pair, wait_until

LAYERS, PAGES = 4, 8


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    # Where nothing is to time out, a loaded machine shall not reach the timeout either.
    post_timeout_ms = getattr(request, "param", 5000)
    with pair("tcp", layers=LAYERS, pages=PAGES, post_timeout_ms=post_timeout_ms) as both:
        both.sender.fill()
        yield both


def faults(side: Any, *rules: dict[str, Any], seed: int = 0) -> None:
    plan = parse_faults(json.dumps({"seed": seed, "rules": rules}))
    side.engine.set_faults([rule.native() for rule in plan.rules], plan.seed)


def send(both: Pair) -> int:
    """All pages but the first, scattered, so that each is a write of its own."""
    source = list(range(1, PAGES))
    transfer = both.open(source, source[::-1])
    step = both.sender.layer_counter.value() // LAYERS
    both.sender.engine.submit_chunks([(transfer, step * LAYERS, 0, len(source), True)])
    both.run_step(step)
    return transfer


def whole(both: Pair) -> bool:
    source = list(range(1, PAGES))
    return bool((both.receiver.bytes[:, source[::-1]] == both.sender.bytes[:, source]).all())


WRITES = LAYERS * (PAGES - 1)


@pytest.mark.parametrize(
    "rule",
    [
        {"at": "post", "action": "refuse", "nth": 3, "times": 20},
        {"at": "post", "action": "refuse", "probability": 0.5},
        {"at": "post", "action": "delay", "nth": 5, "times": 2, "ms": 30},
        {"at": "completion", "action": "delay", "ms": 40},
        {"at": "completion", "action": "delay", "probability": 0.3, "ms": 10},
    ],
)
def test_what_only_takes_longer_ends_well(both: Pair, rule: dict[str, Any]) -> None:
    faults(both.sender, rule, seed=5)
    transfer = send(both)
    (done,) = both.sender.wait(TransferDone)
    both.receiver.wait(InboxFull)
    assert done.transfer == transfer
    assert done.stats.writes == WRITES
    assert whole(both)
    assert both.sender.metric("faults") > 0


@pytest.mark.parametrize(
    ("rule", "reason", "quiesced", "arrives"),
    [
        ({"at": "post", "action": "fail", "nth": 9, "times": 1, "errno": errno.EIO}, "WRITE_FAILED", None, False),
        ({"at": "post", "action": "refuse", "nth": 9}, "POST_TIMEOUT", None, False),
        ({"at": "post", "action": "error", "nth": 9, "times": 1}, "WRITE_FAILED", None, False),
        ({"at": "post", "action": "drop", "nth": 9, "times": 1}, "WRITE_TIMEOUT", True, False),
        ({"at": "completion", "action": "drop", "nth": WRITES, "times": 1}, "WRITE_TIMEOUT", False, True),
        ({"at": "completion", "action": "error", "nth": WRITES, "times": 1}, "WRITE_FAILED", False, True),
    ],
)
@pytest.mark.parametrize("both", [800], indirect=True)
def test_what_breaks_ends_once_and_typed(
    both: Pair, rule: dict[str, Any], reason: str, quiesced: bool | None, arrives: bool
) -> None:
    faults(both.sender, rule)
    transfer = send(both)
    (failed,) = both.sender.wait(TransferFailed)
    (peer,) = both.sender.wait(PeerFailed)
    assert (failed.transfer, failed.reason, peer.reason) == (transfer, reason, reason)
    assert quiesced in (None, failed.quiesced)
    if arrives:
        both.receiver.wait(InboxFull)
        assert whole(both)
    # The next connection is as good as any, and no fault is left.
    faults(both.sender)
    both.connect()
    again = send(both)
    (done,) = both.sender.wait(TransferDone)
    assert done.transfer == again
    assert both.sender.seen == []
    assert both.sender.metric("writes_in_flight") == 0


@pytest.mark.parametrize("at", ["post", "completion"])
def test_what_is_held_waits_for_its_release(both: Pair, at: str) -> None:
    faults(both.sender, {"at": at, "action": "hold", "nth": WRITES, "times": 1})
    send(both)
    wait_until(lambda: both.sender.metric("faults") == 1, "the fault")
    if at == "completion":
        both.receiver.wait(InboxFull)
    assert both.sender.metric("transfers") == 1
    both.sender.engine.release_faults()
    both.sender.wait(TransferDone)
    assert whole(both)


def test_a_held_completion_keeps_a_cancelled_transfer_open(both: Pair) -> None:
    faults(both.sender, {"at": "completion", "action": "hold", "nth": 1, "times": 1})
    transfer = both.open([1, 2], [3, 4])
    both.sender.engine.submit_chunks([(transfer, 0, 0, 1, False)])
    both.run_step(0)
    wait_until(lambda: both.sender.metric("faults") == 1, "the fault")
    both.sender.engine.cancel_transfer(transfer)
    assert both.sender.metric("transfers") == 1
    both.sender.engine.release_faults()
    both.sender.wait(TransferCancelled)


@pytest.mark.parametrize(("action", "full"), [("delay", True), ("hold", True), ("drop", False)])
def test_immediates_may_be_late_or_lost(both: Pair, action: str, full: bool) -> None:
    rule: dict[str, Any] = {"at": "arrival", "action": action, "nth": 2, "times": 3}
    faults(both.receiver, rule | ({"ms": 30} if action == "delay" else {}))
    send(both)
    both.sender.wait(TransferDone)
    wait_until(lambda: both.receiver.metric("faults") == 3, "the faults")
    both.receiver.engine.release_faults()
    if full:
        both.receiver.wait(InboxFull)
    else:
        wait_until(lambda: both.receiver.metric("immediates") == WRITES - 3, "the others")
        assert both.receiver.engine.events() == []
    assert whole(both)


def test_an_immediate_that_is_late_for_its_inbox_counts_for_no_other(both: Pair) -> None:
    faults(both.receiver, {"at": "arrival", "action": "hold", "nth": 1, "times": 1})
    source = list(range(1, PAGES))
    first = both.open(source, source, generation=1)
    slot = both._slots
    both.sender.engine.submit_chunks([(first, 0, 0, len(source), True)])
    both.run_step(0)
    both.sender.wait(TransferDone)
    both.receiver.engine.close_inbox(slot, 1)
    both.receiver.engine.open_inbox(both.endpoint, slot, 2, WRITES)
    both.receiver.engine.release_faults()
    wait_until(lambda: both.receiver.metric("stale_immediates") > 0, "the late immediate")
    second = both.open(source, source, slot=slot, generation=2)
    both.sender.engine.submit_chunks([(second, LAYERS, 0, len(source), True)])
    both.run_step(1)
    (full,) = both.receiver.wait(InboxFull)
    assert (full.generation, full.extents) == (2, WRITES)


def test_faults_concern_the_transfer_and_the_peer_that_they_name(both: Pair) -> None:
    faults(both.sender, {"at": "post", "action": "fail", "transfer": 2}, {"at": "post", "action": "fail", "peer": 99})
    send(both)
    both.sender.wait(TransferDone)
    assert both.sender.metric("faults") == 0
    send(both)
    (failed,) = both.sender.wait(TransferFailed)
    assert failed.transfer == 2


def test_the_same_seed_gives_the_same_faults(both: Pair) -> None:
    counts = []
    for _ in range(2):
        before = both.sender.metric("faults")
        faults(both.sender, {"at": "completion", "action": "delay", "probability": 0.3}, seed=11)
        send(both)
        both.sender.wait(TransferDone)
        counts.append(both.sender.metric("faults") - before)
    assert counts[0] == counts[1] > 0


def test_an_engine_that_is_closed_while_something_is_held_closes(both: Pair) -> None:
    faults(both.sender, {"at": "completion", "action": "hold"})
    send(both)
    wait_until(lambda: both.sender.metric("faults") > 0, "the fault")
    both.sender.engine.close()
    (failed,) = both.sender.wait(TransferFailed)
    assert failed.reason == "ENGINE_CLOSED"


def test_a_plan_is_read_from_json() -> None:
    assert parse_faults("") == FaultPlan()
    plan = parse_faults('{"seed": 3, "rules": [{"at": "post", "action": "delay", "ms": 1.5, "transfer": 7}]}')
    assert plan == FaultPlan((FaultRule("post", "delay", transfer=7, ms=1.5),), 3)
    assert plan.rules[0].native() == (0, 4, 0, 7, -1, 1, 0, 1.0, 1_500_000)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"seeds": 3}',
        '{"seed": -1}',
        '{"rules": {}}',
        '{"rules": [{"at": "post"}]}',
        '{"rules": [{"at": "arrival", "action": "error"}]}',
        '{"rules": [{"at": "nowhere", "action": "drop"}]}',
        '{"rules": [{"at": "post", "action": "drop", "nth": 0}]}',
        '{"rules": [{"at": "post", "action": "drop", "times": 1.5}]}',
        '{"rules": [{"at": "post", "action": "drop", "probability": 1.1}]}',
        '{"rules": [{"at": "post", "action": "drop", "ms": "1"}]}',
        '{"rules": [{"at": "post", "action": "drop", "when": 1}]}',
    ],
)
def test_a_plan_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(FaultsInvalid) as error:
        parse_faults(text)
    assert error.value.reason == "FAULTS_INVALID"
