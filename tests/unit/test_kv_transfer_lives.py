"""Both lives of a transfer, by exhaustion of their states: one end, nothing after it, nothing waits for ever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from baton_kv.errors import InvalidKvArgument
from baton_kv.transfer import inbox, sending
from baton_kv.transfer.inbox import AskStop, Fence, InboxLife, Reusable
from baton_kv.transfer.outcome import Ended, LifeError, Outcome, Proof
from baton_kv.transfer.sending import CancelWrites, Disconnect, TellReceiver, TransferLife
from baton_kv.transfer.slots import SlotKey, SlotNotInUse, SlotsExhausted, SlotTable
from baton_kv.transfer.tombstones import Tombstones

Event = Callable[[Any], list[Any]]

INBOX_EVENTS: dict[str, Event] = {
    "opened": lambda life: life.opened(),
    "open_failed": lambda life: life.open_failed("NO_ENDPOINT"),
    "full": lambda life: life.full(),
    "mismatched": lambda life: life.mismatched(),
    "violated": lambda life: life.violated(),
    "aborted quiesced": lambda life: life.aborted("ABORTED", True),
    "aborted": lambda life: life.aborted("ABORTED", False),
    "stop answered quiesced": lambda life: life.stop_answered(True),
    "stop answered": lambda life: life.stop_answered(False),
    "stop failed": lambda life: life.stop_failed(),
    "peer lost": lambda life: life.peer_lost("PEER_LOST"),
    "close": lambda life: life.close(),
    "fenced": lambda life: life.fenced(),
    "fence failed": lambda life: life.fence_failed(),
    "retry fence": lambda life: life.retry_fence(),
}
# What is sure to come in each stage, one of these.
INBOX_ANSWERS = {
    inbox.Stage.OPENING: ("opened", "open_failed"),
    inbox.Stage.RECEIVING: ("full", "mismatched", "violated", "aborted", "aborted quiesced", "peer lost", "close"),
    inbox.Stage.STOP_REQUESTED: ("stop answered", "stop answered quiesced", "stop failed"),
    inbox.Stage.FENCING: ("fenced", "fence failed"),
    inbox.Stage.UNPROVEN: ("retry fence", "close"),
    inbox.Stage.CLOSED: (),
}
SENDING_EVENTS: dict[str, Event] = {
    "opened": lambda life: life.opened(),
    "open_failed": lambda life: life.open_failed("CANNOT_CONNECT"),
    "done": lambda life: life.done(),
    "failed quiesced": lambda life: life.failed("WRITE_FAILED", True),
    "failed": lambda life: life.failed("WRITE_FAILED", False),
    "cancelled": lambda life: life.cancelled(True),
    "cancel": lambda life: life.cancel(),
    "stop": lambda life: life.stop(),
    "peer lost": lambda life: life.peer_lost("PEER_LOST"),
    "drain expired": lambda life: life.drain_expired(),
}
SENDING_ANSWERS = {
    sending.Stage.OPENING: ("opened", "open_failed"),
    sending.Stage.ACTIVE: ("done", "failed", "failed quiesced", "cancel", "stop", "peer lost"),
    sending.Stage.CANCELLING: ("done", "failed", "failed quiesced", "cancelled"),
    sending.Stage.ENDED: (),
}


def key(life: object) -> tuple[object, ...]:
    return tuple(vars(life).values())


def explore(fresh: object, events: dict[str, Event]) -> dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]]:
    """All reachable states, each with the life in it and the actions of one shortest way there."""
    seen = {key(fresh): (fresh, ())}
    edge = [key(fresh)]
    while edge:
        state = edge.pop(0)
        life, history = seen[state]
        for event in events.values():
            successor = copy.deepcopy(life)
            try:
                actions = event(successor)
            except LifeError:
                assert key(successor) == state
                continue
            if key(successor) not in seen:
                seen[key(successor)] = (successor, (*history, *actions))
                edge.append(key(successor))
    return seen


INBOX_STATES = explore(InboxLife(), INBOX_EVENTS)
SENDING_STATES = explore(TransferLife(), SENDING_EVENTS)


def longest(life: Any, events: dict[str, Event], answers: dict[Any, tuple[str, ...]], failures: int) -> int:
    """Steps to the end if the environment chooses the worst answers, of which `failures` may be failed fences."""
    steps = [0]
    for name in answers[life.stage]:
        if name == "fence failed" and not failures:
            continue
        successor = copy.deepcopy(life)
        events[name](successor)
        assert key(successor) != key(life), f"{name} in {life.stage} is an answer that changes nothing"
        steps.append(1 + longest(successor, events, answers, failures - (name == "fence failed")))
    return max(steps)


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_an_inbox_waits_for_ever_nowhere(failures: int) -> None:
    for life, _ in INBOX_STATES.values():
        assert longest(life, INBOX_EVENTS, INBOX_ANSWERS, failures) <= 4 + 2 * failures


def test_a_sender_waits_for_ever_nowhere() -> None:
    for life, _ in SENDING_STATES.values():
        assert longest(life, SENDING_EVENTS, SENDING_ANSWERS, 0) <= 3


def test_an_inbox_ends_once_and_its_memory_is_free_once_with_a_proof() -> None:
    assert {life.stage for life, _ in INBOX_STATES.values()} == set(inbox.Stage)
    for life, history in INBOX_STATES.values():
        assert [action for action in history if isinstance(action, Ended)] == ([life.ended] if life.ended else [])
        assert [action for action in history if isinstance(action, Reusable)] == (
            [Reusable(life.proof)] if life.proof else []
        )
        if life.stage is inbox.Stage.CLOSED:
            assert isinstance(history[-1], Reusable) and life.ended and life.proof
        else:
            assert life.proof is None
            assert (life.ended is not None) == (life.stage is inbox.Stage.UNPROVEN) or (
                life.ended is not None and life.stage is inbox.Stage.FENCING and not life.ended.quiesced
            )


def test_each_step_of_an_inbox_follows_the_rule_of_reuse() -> None:
    proofs = {
        "full": {Proof.FULL},
        "mismatched": {Proof.FULL},
        "fenced": {Proof.FENCED},
        "aborted quiesced": {Proof.QUIESCED},
        "stop answered quiesced": {Proof.QUIESCED},
        # Nobody had heard of the slot, or it was full before the caller knew that it existed.
        "opened": {Proof.QUIESCED, Proof.FULL},
        "open_failed": {Proof.QUIESCED},
    }
    for life, _ in INBOX_STATES.values():
        for name, event in INBOX_EVENTS.items():
            successor = copy.deepcopy(life)
            try:
                actions = event(successor)
            except LifeError:
                continue
            if life.stage is inbox.Stage.CLOSED:
                assert actions == [] and key(successor) == key(life)
            for action in actions:
                match action:
                    case Reusable(proof):
                        assert proof in proofs[name], (life.stage, name)
                        assert proof is Proof.FENCED or life._trusted or life.stage is inbox.Stage.OPENING
                        assert action is actions[-1]
                    case Ended(outcome, reason, quiesced):
                        assert quiesced == (successor.stage is inbox.Stage.CLOSED)
                        assert (reason == "") == (outcome is Outcome.DONE)
                        assert outcome is not Outcome.DONE or successor.proof is Proof.FULL
                    case Fence():
                        assert successor.stage is inbox.Stage.FENCING and life.stage is not inbox.Stage.FENCING
                    case AskStop():
                        assert life.stage is inbox.Stage.RECEIVING
            if successor.stage is inbox.Stage.FENCING and life.stage is not inbox.Stage.FENCING:
                assert Fence() in actions
            if successor.stage is inbox.Stage.STOP_REQUESTED and life.stage is not inbox.Stage.STOP_REQUESTED:
                assert AskStop() in actions


def test_each_step_of_a_sender_ends_it_once_and_tells_the_receiver_once() -> None:
    assert {life.stage for life, _ in SENDING_STATES.values()} == set(sending.Stage)
    for life, history in SENDING_STATES.values():
        assert [action for action in history if isinstance(action, Ended)] == ([life.ended] if life.ended else [])
        told = [action for action in history if isinstance(action, TellReceiver)]
        if life.ended is None or life.ended.outcome is Outcome.DONE or life._receiver_knows:
            assert told == []
        else:
            assert told == [TellReceiver(life.ended.reason, life.ended.quiesced)]
        if life.stage is sending.Stage.CANCELLING:
            assert CancelWrites() in history or Disconnect() in history
        assert history.count(CancelWrites()) <= 1 and history.count(Disconnect()) <= 1
        for name, event in SENDING_EVENTS.items():
            successor = copy.deepcopy(life)
            try:
                actions = event(successor)
            except LifeError:
                continue
            if life.stage is sending.Stage.ENDED:
                assert actions == [] and key(successor) == key(life)
            if successor.ended and not life.ended:
                assert (successor.ended.outcome is Outcome.DONE) == (name == "done")
                assert successor.ended.quiesced == (name != "failed")
            assert successor.accepts_chunks == (successor.stage is sending.Stage.ACTIVE)


def opened() -> InboxLife:
    life = InboxLife()
    assert life.opened() == []
    return life


def test_an_inbox_that_fills_is_done() -> None:
    assert opened().full() == [Ended(Outcome.DONE, "", True), Reusable(Proof.FULL)]


def test_a_closed_inbox_is_reusable_once_the_sender_confirms() -> None:
    life = opened()
    assert life.close() == [AskStop()]
    assert life.close() == []
    assert life.stop_answered(True) == [Ended(Outcome.CANCELLED, "CLOSED", True), Reusable(Proof.QUIESCED)]
    assert life.full() == []


def test_an_inbox_that_fills_while_the_sender_is_asked_to_stop_is_still_cancelled_once() -> None:
    life = opened()
    life.close()
    assert life.full() == [Ended(Outcome.CANCELLED, "CLOSED", True), Reusable(Proof.FULL)]
    assert life.stop_answered(True) == []


def test_a_mute_sender_is_fenced() -> None:
    life = opened()
    life.close()
    assert life.stop_failed() == [Fence()]
    assert life.fenced() == [Ended(Outcome.CANCELLED, "CLOSED", True), Reusable(Proof.FENCED)]


def test_a_fence_that_fails_means_quarantine_until_one_succeeds() -> None:
    life = opened()
    assert life.peer_lost("PEER_LOST") == [Fence()]
    assert life.fence_failed() == [Ended(Outcome.FAILED, "PEER_LOST", False)]
    assert life.retry_fence() == [Fence()]
    assert life.fence_failed() == []
    assert life.retry_fence() == [Fence()]
    assert life.fenced() == [Reusable(Proof.FENCED)]


def test_a_sender_that_wrote_too_much_is_not_believed() -> None:
    life = opened()
    assert life.violated() == [Fence()]
    assert life.aborted("ABORTED", True) == []
    assert life.stop_answered(True) == []
    assert life.full() == []
    assert life.fenced() == [Ended(Outcome.FAILED, "TOO_MANY_EXTENTS", True), Reusable(Proof.FENCED)]


def test_everything_arrived_although_the_sender_was_taken_for_dead() -> None:
    life = opened()
    life.peer_lost("PEER_LOST")
    assert life.full() == [Ended(Outcome.DONE, "", True), Reusable(Proof.FULL)]


def test_a_stop_that_overtakes_the_opening_cancels_it() -> None:
    life = TransferLife()
    assert life.stop() == []
    assert life.opened() == [CancelWrites()]
    assert life.cancelled(True) == [Ended(Outcome.CANCELLED, "STOPPED_BY_RECEIVER", True)]


def test_completion_beats_a_cancel_that_comes_too_late() -> None:
    life = TransferLife()
    life.opened()
    assert life.cancel() == [CancelWrites()]
    assert life.done() == [Ended(Outcome.DONE, "", True)]
    assert life.cancelled(True) == []


def test_a_lost_receiver_names_the_failure() -> None:
    life = TransferLife()
    life.opened()
    assert life.peer_lost("PEER_RESTARTED") == [Disconnect()]
    assert life.failed("DISCONNECTED", False) == [
        Ended(Outcome.FAILED, "PEER_RESTARTED", False),
        TellReceiver("PEER_RESTARTED", False),
    ]


def test_a_drain_that_takes_too_long_is_cut() -> None:
    life = TransferLife()
    life.opened()
    assert life.drain_expired() == []
    life.cancel()
    assert life.drain_expired() == [Disconnect()]
    assert life.drain_expired() == []
    assert life.failed("DISCONNECTED", False)[0] == Ended(Outcome.FAILED, "DISCONNECTED", False)


def test_a_callers_own_mistake_is_an_error() -> None:
    life = opened()
    with pytest.raises(LifeError):
        life.opened()
    with pytest.raises(LifeError):
        life.open_failed("WHY")
    sender = TransferLife()
    sender.opened()
    with pytest.raises(LifeError):
        sender.open_failed("WHY")


def test_a_slot_is_given_out_again_only_after_its_proof() -> None:
    table = SlotTable(2)
    first, second = table.open(), table.open()
    assert (first, second) == ((0, 1), (1, 1))
    with pytest.raises(SlotsExhausted):
        table.open()
    assert table.proof(*first) is None
    table.release(*first, Proof.FENCED)
    assert table.proof(*first) is Proof.FENCED
    assert table.open() == SlotKey(0, 2)
    assert table.proof(*first) is Proof.QUIESCED
    assert (table.is_open(*first), table.is_open(0, 2), table.in_use, table.total) == (False, True, 2, 2)
    with pytest.raises(SlotNotInUse):
        table.release(*first, Proof.FULL)
    for slot, generation in ((0, 3), (0, 0), (2, 1), (-1, 1)):
        with pytest.raises(SlotNotInUse):
            table.proof(slot, generation)
    for slots in (0, 4097):
        with pytest.raises(InvalidKvArgument):
            SlotTable(slots)


def test_the_slot_that_rested_longest_is_next() -> None:
    table = SlotTable(3)
    table.release(*table.open(), Proof.FULL)
    assert [table.open() for _ in range(3)] == [(1, 1), (2, 1), (0, 2)]


def test_tombstones_forbid_what_was_stopped_and_all_before() -> None:
    stones = Tombstones(limit=2)
    stones.bury(1, slot=5, generation=7)
    assert stones.is_dead(1, 5, 7) and stones.is_dead(1, 5, 6)
    assert not stones.is_dead(1, 5, 8) and not stones.is_dead(1, 4, 7) and not stones.is_dead(2, 5, 7)
    stones.bury(1, slot=5, generation=6, quiesced=False)
    assert stones.is_dead(1, 5, 7) and not stones.is_quiesced(1, 5, 6) and stones.is_quiesced(1, 5, 7)


def test_tombstones_are_bounded_but_keep_receivers_with_open_transfers() -> None:
    stones = Tombstones(limit=2)
    for incarnation in (1, 2, 3, 4):
        stones.bury(incarnation, 0, 1)
    stones.forget(keep={1})
    assert len(stones) == 2
    assert stones.is_dead(1, 0, 1) and stones.is_dead(4, 0, 1) and not stones.is_dead(2, 0, 1)
