"""Which workers a request goes to."""

from __future__ import annotations

import pytest
from baton.v1 import registry_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.errors import NoDecodeWorker, NoPrefillWorker, NoWorker, NoWorkerForModel
from baton_gateway.load import LoadBook
from baton_gateway.routing import COLOCATED, DECODE, PREFILL, Candidate, RoutingRules, choose, context_length
from fake_decode import worker_info

RULES = RoutingRules("test-model", prefill_candidates=2)


def _worker(worker_id: str, role: registry_pb2.WorkerRole.ValueType, **options: object) -> registry_pb2.WorkerInfo:
    load = {
        name: options.pop(name) for name in list(options) if name in registry_pb2.WorkerLoad.DESCRIPTOR.fields_by_name
    }
    return worker_info(worker_id, role=role, load=registry_pb2.WorkerLoad(**load), **options)  # type: ignore[arg-type]


def _candidates(*workers: registry_pb2.WorkerInfo) -> list[Candidate]:
    return LoadBook().candidates(workers)


def _names(workers: tuple[registry_pb2.WorkerInfo, ...]) -> list[str]:
    return [worker.worker_id for worker in workers]


def test_the_least_loaded_decode_worker_and_ranked_prefill_workers() -> None:
    route = choose(
        _candidates(
            _worker("d0", DECODE, running_requests=2, waiting_requests=1),
            _worker("d1", DECODE, running_requests=2),
            _worker("p0", PREFILL, queued_prompt_tokens=900),
            _worker("p1", PREFILL, queued_prompt_tokens=100),
            _worker("p2", PREFILL, queued_prompt_tokens=500),
        ),
        RULES,
        100,
        10,
    )
    assert route.decode.worker_id == "d1"
    assert _names(route.prefill) == ["p1", "p2"]


def test_only_workers_with_the_same_weights_serve_one_request() -> None:
    workers = [
        _worker("d0", DECODE, fingerprint="old"),
        _worker("p0", PREFILL, fingerprint="new", queued_prompt_tokens=0),
        _worker("p1", PREFILL, fingerprint="old", queued_prompt_tokens=9_999),
    ]
    assert _names(choose(_candidates(*workers), RULES, 100, 10).prefill) == ["p1"]
    with pytest.raises(NoPrefillWorker) as caught:
        choose(_candidates(*workers[:2]), RULES, 100, 10)
    assert caught.value.fields == {"model": "test-model", "decode_workers": "1", "prefill_workers": "1"}


def test_a_decode_worker_that_can_be_served_is_preferred_to_an_idle_one_that_cannot() -> None:
    workers = [
        _worker("d0", DECODE, fingerprint="alone"),
        _worker("d1", DECODE, running_requests=9),
        _worker("p0", PREFILL),
    ]
    assert choose(_candidates(*workers), RULES, 100, 10).decode.worker_id == "d1"


def test_a_colocated_worker_is_offered_no_prefill_workers() -> None:
    route = choose(_candidates(_worker("c0", COLOCATED), _worker("p0", PREFILL)), RULES, 100, 10)
    assert route.prefill == ()


def test_a_prompt_of_one_token_needs_no_prefill_worker() -> None:
    assert choose(_candidates(_worker("d0", DECODE)), RULES, 1, 10).prefill == ()
    with pytest.raises(NoPrefillWorker):
        choose(_candidates(_worker("d0", DECODE)), RULES, 2, 10)


def test_where_decode_workers_compute_prompts_none_is_needed_but_offered() -> None:
    rules = RoutingRules("test-model", decode_computes_prompts=True)
    assert choose(_candidates(_worker("d0", DECODE)), rules, 100, 10).prefill == ()
    route = choose(_candidates(_worker("d0", DECODE), _worker("p0", PREFILL)), rules, 100, 10)
    assert _names(route.prefill) == ["p0"]


def test_room_for_the_request_comes_before_few_requests() -> None:
    route = choose(
        _candidates(
            _worker("full", COLOCATED, running_requests=1, free_pages=3, total_pages=100),
            _worker("roomy", COLOCATED, running_requests=5, free_pages=50, total_pages=100),
            _worker("small", COLOCATED, running_requests=0, free_pages=4, total_pages=4),
        ),
        RULES,
        60,
        20,
    )
    assert route.decode.worker_id == "roomy"


def test_equals_take_turns() -> None:
    book = LoadBook()
    workers = [_worker(name, COLOCATED) for name in ("c0", "c1", "c2")]
    chosen = []
    for _ in range(6):
        decode = choose(book.candidates(workers), RULES, 10, 10).decode
        with book.request((decode.worker_id, decode.incarnation)):
            chosen.append(decode.worker_id)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["c0", "c1", "c2"]


def test_each_missing_part_has_its_own_reason() -> None:
    with pytest.raises(NoDecodeWorker):
        choose([], RULES, 10, 10)
    with pytest.raises(NoDecodeWorker):
        choose(_candidates(_worker("p0", PREFILL)), RULES, 10, 10)
    with pytest.raises(NoWorkerForModel, match="other-model"):
        choose(_candidates(_worker("c0", COLOCATED, model="other-model")), RULES, 10, 10)
    with pytest.raises(NoDecodeWorker, match="no other"):
        choose(_candidates(_worker("c0", COLOCATED)), RULES, 10, 10, excluded={("c0", 1)})


def test_an_excluded_worker_comes_back_under_a_new_incarnation() -> None:
    workers = _candidates(_worker("c0", COLOCATED, incarnation=2))
    assert choose(workers, RULES, 10, 10, excluded={("c0", 1)}).decode.incarnation == 2


def test_the_context_is_what_every_decode_worker_takes() -> None:
    workers = _candidates(
        _worker("c0", COLOCATED, max_model_len=512),
        _worker("d0", DECODE, max_model_len=256),
        _worker("p0", PREFILL, max_model_len=64),
        _worker("x0", DECODE, model="other", max_model_len=32),
    )
    assert context_length(workers, "test-model") == 256
    assert context_length([], "test-model") is None


@given(
    st.lists(
        st.builds(
            _worker,
            st.text("abc", min_size=1, max_size=3),
            st.sampled_from([PREFILL, DECODE, COLOCATED]),
            model=st.sampled_from(["test-model", "test-model", "other"]),
            fingerprint=st.sampled_from(["f1", "f2"]),
            running_requests=st.integers(0, 5),
            free_pages=st.integers(0, 9),
            total_pages=st.just(9),
            queued_prompt_tokens=st.integers(0, 99),
        ),
        max_size=8,
        unique_by=lambda worker: worker.worker_id,
    ),
    st.integers(1, 100),
)
def test_a_route_is_consistent_and_found_whenever_there_is_one(
    workers: list[registry_pb2.WorkerInfo], prompt_tokens: int
) -> None:
    serving = [w for w in workers if w.model.name == "test-model"]
    able = [
        w
        for w in serving
        if w.role == COLOCATED
        or (w.role == DECODE and prompt_tokens == 1)
        or (w.role == DECODE and any(p.role == PREFILL and p.model.fingerprint == w.model.fingerprint for p in serving))
    ]
    if not able:
        with pytest.raises(NoWorker):
            choose(_candidates(*workers), RULES, prompt_tokens, 10)
        return
    route = choose(_candidates(*workers), RULES, prompt_tokens, 10)
    assert route.decode in able
    assert len(route.prefill) <= RULES.prefill_candidates
    assert all(p.role == PREFILL and p.model.fingerprint == route.decode.model.fingerprint for p in route.prefill)
    assert bool(route.prefill) == (route.decode.role == DECODE and prompt_tokens > 1)


# --- the gateway's own knowledge of load ------------------------------------------------------------------------------


def test_what_was_just_sent_counts_before_the_worker_reports_it() -> None:
    book = LoadBook()
    workers = [_worker("c0", COLOCATED), _worker("c1", COLOCATED, running_requests=1)]
    book.reported(("c0", 1))
    with book.request(("c0", 1)), book.request(("c0", 1)):
        assert choose(book.candidates(workers), RULES, 10, 10).decode.worker_id == "c1"
    assert choose(book.candidates(workers), RULES, 10, 10).decode.worker_id == "c0"


def test_what_a_report_contains_is_not_counted_twice() -> None:
    book = LoadBook()
    with book.request(("c0", 1)):
        book.reported(("c0", 1))
        (candidate,) = book.candidates([_worker("c0", COLOCATED, running_requests=3)])
        assert candidate.requests == 3
        with book.request(("c0", 1)):
            (candidate,) = book.candidates([_worker("c0", COLOCATED, running_requests=3)])
            assert candidate.requests == 4
    (candidate,) = book.candidates([_worker("c0", COLOCATED, running_requests=3)])
    assert candidate.requests == 2


def test_prompt_tokens_count_until_the_offer_is_closed_once() -> None:
    book = LoadBook()
    worker = _worker("p0", PREFILL)
    offer = book.prompt(("p0", 1), 700)
    assert book.candidates([worker])[0].prompt_tokens == 700
    offer.close()
    offer.close()
    assert book.candidates([worker])[0].prompt_tokens == 0


def test_an_account_in_use_outlives_the_worker_and_not_its_last_request() -> None:
    book = LoadBook()
    offer = book.prompt(("c0", 1), 70)
    with book.request(("c0", 1)):
        book.forget(("c0", 1))
        offer.close()
        assert book.candidates([_worker("c0", COLOCATED)])[0].requests == 1
    assert book.candidates([_worker("c0", COLOCATED)])[0] == Candidate(_worker("c0", COLOCATED))
    assert not book._accounts


def test_a_worker_that_comes_back_while_it_serves_keeps_its_account() -> None:
    book = LoadBook()
    with book.request(("c0", 1)):
        book.forget(("c0", 1))
        book.reported(("c0", 1))
    assert len(book._accounts) == 1


def test_a_request_for_the_rest_of_the_context_needs_room_for_all_of_it() -> None:
    route = choose(
        _candidates(
            _worker("full", COLOCATED, free_pages=31, total_pages=100),
            _worker("roomy", COLOCATED, running_requests=5, free_pages=32, total_pages=100),
        ),
        RULES,
        60,
        0,
    )
    assert route.decode.worker_id == "roomy"
