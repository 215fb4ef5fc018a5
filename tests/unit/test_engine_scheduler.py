"""The scheduler computes every token once, in order, within its budget, and nobody waits for ever."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from baton_engine.errors import EngineError, SequenceInvalid, StepMismatch
from baton_engine.messages import (
    FinishReason,
    PositionLogprobs,
    Sampling,
    StepItem,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from baton_engine.scheduler import Finished, NewTokens, PrefillAdvanced, Scheduler, Sequence, Update

PAGE = 4
EOS = 7


def sequence(
    sequence_id: int, prompt: int, *, computed: int = 0, max_tokens: int = 4, prefill_only: bool = False, **more: object
) -> Sequence:
    positions = prompt if prefill_only else prompt + max_tokens
    pages = tuple(range(-(-positions // PAGE)))
    made = Sequence(
        sequence_id,
        tuple(range(100, 100 + prompt)),
        pages,
        computed=computed,
        prefill_only=prefill_only,
        max_tokens=max_tokens,
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def result(plan: StepPlan, token: int = 1) -> StepResult:
    samples = sum(item.sample for item in plan.items)
    return StepResult(plan.step, (token,) * samples, (), 0, 0, 0, 0, (0,))


def run(scheduler: Scheduler, token: int = 1) -> tuple[list[StepPlan], list[Update]]:
    plans, updates = [], []
    while (plan := scheduler.next_step()) is not None:
        plans.append(plan)
        updates += scheduler.complete(result(plan, token))
    return plans, updates


def ranges(plans: list[StepPlan], sequence_id: int) -> list[tuple[int, int]]:
    return [(item.start, item.end) for plan in plans for item in plan.items if item.sequence_id == sequence_id]


def test_a_prompt_is_computed_in_chunks_then_decoded() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(5, 10, max_tokens=3))
    plans, updates = run(scheduler)
    assert ranges(plans, 5) == [(0, 4), (4, 8), (8, 10), (10, 11), (11, 12)]
    assert [plan.step for plan in plans] == [0, 1, 2, 3, 4]
    assert [item.sample for plan in plans for item in plan.items] == [False, False, True, True, True]
    assert [item.prefill for plan in plans for item in plan.items] == [True, True, True, False, False]
    assert plans[3].items[0].token_ids == (1,)
    assert updates == [
        PrefillAdvanced(5, 4),
        PrefillAdvanced(5, 8),
        PrefillAdvanced(5, 10),
        NewTokens(5, (1,)),
        NewTokens(5, (1,)),
        NewTokens(5, (1,)),
        Finished(5, FinishReason.LENGTH),
    ]


def test_prefill_only_stops_before_the_last_prompt_token_and_never_samples() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=1, page_size=PAGE)
    scheduler.add(sequence(1, 10, computed=4, prefill_only=True))
    plans, updates = run(scheduler)
    assert ranges(plans, 1) == [(4, 8), (8, 9)]
    assert plans[0].starts[0].sampling is None
    assert not any(item.sample for plan in plans for item in plan.items)
    assert updates == [PrefillAdvanced(1, 8), PrefillAdvanced(1, 9), Finished(1, FinishReason.PREFILLED)]


def test_two_prompts_that_fit_share_a_step() -> None:
    scheduler = Scheduler(chunk_tokens=16, max_batch=4, page_size=PAGE)
    scheduler.add(sequence(1, 7, prefill_only=True))
    scheduler.add(sequence(2, 20, prefill_only=True))
    plan = scheduler.next_step()
    assert plan is not None
    assert [(item.sequence_id, item.start, item.end) for item in plan.prefills] == [(1, 0, 6), (2, 0, 10)]
    assert plan.tokens == 16


def test_decodes_come_first_and_a_prompt_gets_the_rest() -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=4, page_size=PAGE)
    for sequence_id in (1, 2):
        scheduler.add(sequence(sequence_id, 5, computed=4))
    scheduler.add(sequence(3, 30))
    plan = scheduler.next_step()
    assert plan is not None
    assert [(item.sequence_id, len(item.token_ids), item.prefill) for item in plan.items] == [
        (1, 1, False),
        (2, 1, False),
        (3, 6, True),
    ]


def test_decodes_that_use_the_budget_up_leave_a_prompt_one_token() -> None:
    scheduler = Scheduler(chunk_tokens=2, max_batch=4, page_size=PAGE)
    for sequence_id in (1, 2, 3):
        scheduler.add(sequence(sequence_id, 5, computed=4))
    scheduler.add(sequence(4, 30))
    plan = scheduler.next_step()
    assert plan is not None and plan.tokens == 4 and plan.items[-1].sequence_id == 4


def test_slots_go_out_in_order_of_arrival() -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=1, page_size=PAGE)
    scheduler.add(sequence(1, 5, computed=4, max_tokens=2))
    scheduler.add(sequence(2, 9, max_tokens=1))
    scheduler.add(sequence(3, 5, computed=4, max_tokens=1))
    plans, _ = run(scheduler)
    assert [plan.items[0].sequence_id for plan in plans] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("ignore_eos", "tokens", "reason"), [(False, 1, FinishReason.STOP), (True, 3, FinishReason.LENGTH)]
)
def test_a_stop_token_ends_a_sequence_even_as_its_first(ignore_eos: bool, tokens: int, reason: FinishReason) -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=1, page_size=PAGE)
    scheduler.add(sequence(1, 2, max_tokens=3, stop_token_ids=frozenset({EOS}), ignore_eos=ignore_eos))
    _, updates = run(scheduler, token=EOS)
    assert updates.count(NewTokens(1, (EOS,))) == tokens
    assert updates[-1] == Finished(1, reason)


def test_a_sequence_is_introduced_once_and_released_once() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 6, max_tokens=1, sampling=Sampling(seed=9)))
    plans, _ = run(scheduler)
    assert [start.sequence_id for plan in plans for start in plan.starts] == [1]
    assert plans[0].starts[0].sampling == Sampling(seed=9)
    scheduler.add(sequence(1, 6, max_tokens=1))
    again = scheduler.next_step()
    assert again is not None and again.releases == (1,) and [start.sequence_id for start in again.starts] == [1]


def test_cancelling_between_steps_ends_a_sequence_at_once_and_only_once() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 6))
    assert scheduler.cancel(1) == [Finished(1, FinishReason.CANCELLED)]
    assert scheduler.cancel(1) == []
    assert scheduler.next_step() is None


@pytest.mark.parametrize("fails", [False, True])
def test_cancelling_during_a_step_takes_effect_at_its_end(fails: bool) -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 4))
    plan = scheduler.next_step()
    assert plan is not None
    assert scheduler.cancel(1) == scheduler.cancel(1) == []
    ended = scheduler.fail(plan.step) if fails else scheduler.complete(result(plan))
    assert ended == [Finished(1, FinishReason.CANCELLED)]
    assert scheduler.next_step() is None


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 6))
    scheduler.add(sequence(2, 6))
    plan = scheduler.next_step()
    assert plan is not None
    assert scheduler.fail(plan.step) == [Finished(1, FinishReason.FAILED)]
    plan = scheduler.next_step()
    assert plan is not None and plan.step == 1 and plan.releases == (1,)
    assert [item.sequence_id for item in plan.items] == [2]


def test_at_most_one_step_is_in_flight_and_only_its_result_counts() -> None:
    scheduler = Scheduler(chunk_tokens=4, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 3))
    plan = scheduler.next_step()
    assert plan is not None and scheduler.next_step() is None and scheduler.in_flight is plan
    with pytest.raises(StepMismatch):
        scheduler.complete(msgspec.structs.replace(result(plan), step=1))
    with pytest.raises(StepMismatch):
        scheduler.complete(msgspec.structs.replace(result(plan), token_ids=()))
    with pytest.raises(StepMismatch):
        scheduler.fail(1)
    assert len(scheduler.complete(result(plan))) == 2


def test_logprobs_reach_the_sequence_that_asked() -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(1, 2, max_tokens=1))
    scheduler.add(sequence(2, 2, max_tokens=1))
    plan = scheduler.next_step()
    assert plan is not None
    logprobs = PositionLogprobs(TokenLogprob(4, -0.5), ())
    updates = scheduler.complete(StepResult(0, (3, 4), (None, logprobs), 0, 0, 0, 0, (0,)))
    assert NewTokens(1, (3,), ()) in updates and NewTokens(2, (4,), (logprobs,)) in updates


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"token_ids": ()}, "empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"computed": 6}, "computed"),
        ({"computed": -1}, "computed"),
        ({"computed": 5, "prefill_only": True}, "computed"),
        ({"pages": (0, 1)}, "2 pages"),
        ({"sequence_id": 9}, "in use"),
    ],
)
def test_a_sequence_that_cannot_run_is_refused(wrong: dict[str, object], complaint: str) -> None:
    scheduler = Scheduler(chunk_tokens=8, max_batch=2, page_size=PAGE)
    scheduler.add(sequence(9, 1))
    with pytest.raises(SequenceInvalid, match=complaint):
        scheduler.add(dataclasses.replace(sequence(1, 6), **wrong))  # type: ignore[arg-type]


def test_a_scheduler_without_budget_is_refused() -> None:
    with pytest.raises(EngineError, match="chunk_tokens is 0"):
        Scheduler(chunk_tokens=0, max_batch=1, page_size=1)


@given(
    prompts=st.lists(
        st.tuples(st.integers(2, 40), st.booleans(), st.integers(1, 5), st.integers(0, 39)), min_size=1, max_size=12
    ),
    chunk_tokens=st.integers(1, 24),
    max_batch=st.integers(1, 5),
)
@settings(max_examples=150)
def test_the_load_figures_add_up(prompts: list[tuple[int, bool, int, int]], chunk_tokens: int, max_batch: int) -> None:
    scheduler = Scheduler(chunk_tokens=chunk_tokens, max_batch=max_batch, page_size=PAGE)
    for index, (prompt, prefill_only, max_tokens, cached) in enumerate(prompts):
        computed = min(cached, prompt - 2)
        scheduler.add(sequence(index, prompt, prefill_only=prefill_only, max_tokens=max_tokens, computed=computed))
    expected = scheduler.queued_prompt_tokens
    assert scheduler.waiting == len(prompts) and scheduler.running == 0
    run(scheduler)
    assert scheduler.queued_prompt_tokens == scheduler.waiting == scheduler.running == 0
    targets = [prompt - prefill_only for prompt, prefill_only, _, _ in prompts]
    assert expected == sum(
        target - min(cached, prompt - 2) for target, (prompt, _, _, cached) in zip(targets, prompts, strict=True)
    )


class Life(RuleBasedStateMachine):
    """Adds, cancels, completes and fails in any order, and compares with what each sequence is owed."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.chunk_tokens, self.max_batch = 6, 3
        self.scheduler = Scheduler(chunk_tokens=self.chunk_tokens, max_batch=self.max_batch, page_size=PAGE)
        self.sequences: dict[int, Sequence] = {}
        self.cached: dict[int, list[int]] = {}
        self.drawn: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()
        self.known: set[int] = set()  # to the model process
        self.waited: dict[int, int] = {}
        self.plan: StepPlan | None = None
        self.steps = 0

    @rule(
        target=live,
        prompt=st.integers(1, 20),
        cached=st.integers(0, 19),
        prefill_only=st.booleans(),
        max_tokens=st.integers(1, 4),
        stops=st.booleans(),
    )
    def add(self, prompt: int, cached: int, prefill_only: bool, max_tokens: int, stops: bool) -> int:
        prefill_only = prefill_only and prompt > 1
        sequence_id = len(self.sequences)
        added = sequence(
            sequence_id,
            prompt,
            computed=min(cached, prompt - 1 - prefill_only),
            prefill_only=prefill_only,
            max_tokens=max_tokens,
            stop_token_ids=frozenset({EOS}) if stops else frozenset(),
        )
        self.scheduler.add(added)
        self.sequences[sequence_id] = added
        self.cached[sequence_id] = list(added.token_ids[: added.computed])
        self.drawn[sequence_id] = []
        self.waited[sequence_id] = 0
        return sequence_id

    @rule(sequence_id=consumes(live))
    def cancel(self, sequence_id: int) -> None:
        self.cancelled.add(sequence_id)
        running = self.plan is not None and any(item.sequence_id == sequence_id for item in self.plan.items)
        gone = sequence_id in self.finished
        updates = self.scheduler.cancel(sequence_id)
        assert updates == ([] if running or gone else [Finished(sequence_id, FinishReason.CANCELLED)])
        self._take(updates)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin(self) -> None:
        plan = self.scheduler.next_step()
        active = [sequence_id for sequence_id in self.sequences if sequence_id not in self.finished]
        assert (plan is None) == (not active)  # work conserving
        if plan is None:
            return
        assert plan.step == self.steps
        self.steps += 1
        self.plan = plan
        self.known -= set(plan.releases)
        assert not self.known & {start.sequence_id for start in plan.starts}
        self.known |= {start.sequence_id for start in plan.starts}
        ids = [item.sequence_id for item in plan.items]
        assert len(set(ids)) == len(ids) and set(ids) <= self.known and not set(ids) & set(self.finished)
        self._check_budget(plan, active)
        for item in plan.items:
            self._check_item(item)

    def _check_budget(self, plan: StepPlan, active: list[int]) -> None:
        decodes = [item for item in plan.items if not item.prefill]
        assert len(decodes) <= self.max_batch
        assert plan.tokens <= max(self.chunk_tokens, len(decodes) + 1)
        assert plan.items == (*decodes, *plan.prefills)
        # Every sequence that has drawn a token, and has not ended, gets its next.
        assert {i for i in active if self.drawn[i]} <= {item.sequence_id for item in decodes}
        # First come, first served: at most all the work that came before is done first, however much comes after.
        for sequence_id in active:
            taken = any(item.sequence_id == sequence_id for item in plan.items)
            self.waited[sequence_id] = 0 if taken else self.waited[sequence_id] + 1
            ahead = 25 * sequence_id
            assert self.waited[sequence_id] <= ahead

    def _check_item(self, item: StepItem) -> None:
        owed = self.sequences[item.sequence_id]
        tokens = [*owed.token_ids, *self.drawn[item.sequence_id]]
        assert item.start == len(self.cached[item.sequence_id])
        assert list(item.token_ids) == tokens[item.start : item.end] and item.token_ids
        assert item.sample == (not owed.prefill_only and item.end >= len(owed.token_ids))
        assert item.end <= len(owed.pages) * PAGE
        assert item.end <= owed.target + owed.max_tokens - 1

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        self._take_result(plan, [data.draw(st.sampled_from([1, 2, EOS])) for item in plan.items if item.sample])

    def _take_result(self, plan: StepPlan, tokens: list[int]) -> None:
        for item in plan.items:
            self.cached[item.sequence_id] += item.token_ids
        sampling = [item.sequence_id for item in plan.items if item.sample]
        self._take(self.scheduler.complete(StepResult(plan.step, tuple(tokens), (), 0, 0, 0, 0, (0,))))
        for sequence_id, token in zip(sampling, tokens, strict=True):
            assert sequence_id in self.cancelled or self.drawn[sequence_id][-1] == token

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        self._take(self.scheduler.fail(plan.step))
        assert all(item.sequence_id in self.finished for item in plan.items)

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            sequence_id = update.sequence_id
            assert sequence_id not in self.finished
            if isinstance(update, NewTokens):
                self.drawn[sequence_id] += update.token_ids
            elif isinstance(update, PrefillAdvanced):
                assert update.computed == len(self.cached[sequence_id])
            else:
                self.finished[sequence_id] = update.reason
                self._check_end(self.sequences[sequence_id], update.reason)

    def _check_end(self, owed: Sequence, reason: FinishReason) -> None:
        drawn = self.drawn[owed.sequence_id]
        if reason is FinishReason.STOP:
            assert drawn[-1] == EOS and EOS not in drawn[:-1] and owed.stop_token_ids
        elif reason is FinishReason.LENGTH:
            assert len(drawn) == owed.max_tokens and not (owed.stop_token_ids and EOS in drawn)
        elif reason is FinishReason.PREFILLED:
            assert self.cached[owed.sequence_id] == list(owed.token_ids[:-1]) and not drawn
        elif reason is FinishReason.CANCELLED:
            assert owed.sequence_id in self.cancelled

    @invariant()
    def counts_agree(self) -> None:
        active = len(self.sequences) - len(self.finished)
        assert self.scheduler.running + self.scheduler.waiting == active

    def teardown(self) -> None:
        for _ in range(2 + 25 * len(self.sequences)):
            if self.plan is None:
                self.begin()
            if self.plan is None:
                break
            plan, self.plan = self.plan, None
            self._take_result(plan, [1] * sum(item.sample for item in plan.items))
        assert set(self.finished) == set(self.sequences)
        assert self.scheduler.next_step() is None


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=60)
