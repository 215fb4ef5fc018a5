"""Which worker has seen the beginning of a prompt before, and how much that counts."""

from __future__ import annotations

import random

from baton.v1 import registry_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.affinity import BLOCK, WORKERS, PrefixMemory, Trail
from baton_gateway.load import LoadBook
from baton_gateway.routing import DECODE, PREFILL, PREFIX_REQUESTS, RoutingRules, choose
from fake_decode import worker_info

RULES = RoutingRules("test-model")
D0, D1, P0, P1 = (("d0", 1), ("d1", 1), ("p0", 1), ("p1", 1))


def tokens(blocks: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(blocks * BLOCK)]


def serve(
    memory: PrefixMemory, prompt: list[int], answer: list[int], decode: tuple[str, int], prefill: tuple[str, int] | None
) -> None:
    trail = Trail(memory, prompt, "")
    for token in answer:
        trail.answered([token], decode, prefill)
    trail.ended(decode)


def test_whoever_served_a_prompt_has_its_whole_blocks_and_the_decode_worker_the_answers_too() -> None:
    memory = PrefixMemory()
    prompt, answer = tokens(3), tokens(2, seed=1)
    serve(memory, prompt, answer, D0, P0)
    assert Trail(memory, [*prompt, 1], "").held() == {D0: 3 * BLOCK, P0: 2 * BLOCK}
    assert Trail(memory, [*prompt, *answer, 1], "").held() == {D0: 4 * BLOCK, P0: 2 * BLOCK}
    assert Trail(memory, [*prompt[: BLOCK + 5], 1], "").held() == {D0: BLOCK, P0: BLOCK}
    assert Trail(memory, prompt[1:], "").held() == {}
    assert Trail(memory, prompt, "another salt").held() == {}


def test_a_request_that_got_no_answer_leaves_no_trail() -> None:
    memory = PrefixMemory()
    serve(memory, tokens(3), [], D0, P0)
    assert len(memory) == 0


def test_a_worker_counts_only_as_far_as_it_has_everything_from_the_beginning() -> None:
    memory = PrefixMemory()
    serve(memory, tokens(4), [1], D0, None)
    serve(memory, tokens(4)[: 2 * BLOCK] + tokens(4, seed=1), [1], D1, None)
    assert Trail(memory, [*tokens(4), 1], "").held() == {D0: 4 * BLOCK, D1: 2 * BLOCK}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=30))
def test_memory_is_bounded_and_beginnings_last_longest(served: list[tuple[int, int]]) -> None:
    memory = PrefixMemory(capacity=8)
    for seed, blocks in served:
        serve(memory, tokens(blocks, seed), [1], D0, None)
        assert len(memory) <= 8
    seed, blocks = served[-1]
    assert Trail(memory, [*tokens(blocks, seed), 1], "").held() == {D0: blocks * BLOCK}


def test_a_block_that_everybody_has_remembers_the_latest() -> None:
    memory = PrefixMemory()
    for number in range(WORKERS + 3):
        serve(memory, tokens(2), [1], (f"d{number}", 1), None)
    assert set(Trail(memory, tokens(2), "").held()) == {(f"d{number}", 1) for number in range(3, WORKERS + 3)}


def worker(worker_id: str, role: registry_pb2.WorkerRole.ValueType, **load: int) -> registry_pb2.WorkerInfo:
    return worker_info(worker_id, role=role, load=registry_pb2.WorkerLoad(**load))


def route(held: dict[tuple[str, int], int], *workers: registry_pb2.WorkerInfo) -> tuple[str, list[str]]:
    chosen = choose(LoadBook().candidates(workers), RULES, 1000, 10, held=held)
    return chosen.decode.worker_id, [prefill.worker_id for prefill in chosen.prefill]


def test_equals_are_told_apart_by_what_they_have() -> None:
    workers = [worker("d0", DECODE), worker("d1", DECODE), worker("p0", PREFILL), worker("p1", PREFILL)]
    assert route({}, *workers) == ("d0", ["p0", "p1"])
    assert route({D1: 64, P1: 64}, *workers) == ("d1", ["p1", "p0"])


def test_a_decode_worker_with_the_prompt_may_have_a_few_requests_more() -> None:
    def decode(requests: int, held: int) -> str:
        workers = worker("d0", DECODE), worker("d1", DECODE, running_requests=requests), worker("p0", PREFILL)
        return route({D1: held}, *workers)[0]

    assert decode(PREFIX_REQUESTS - 1, 992) == "d1"
    assert decode(PREFIX_REQUESTS, 992) == "d0"
    assert (decode(1, 512), decode(3, 512)) == ("d1", "d0")


def test_room_comes_before_a_prefix() -> None:
    full = worker("d1", DECODE, free_pages=1, total_pages=100)
    free = worker("d0", DECODE, free_pages=90, total_pages=100)
    assert route({D1: 992}, free, full, worker("p0", PREFILL))[0] == "d0"


def test_a_prefill_worker_is_ranked_by_what_it_would_have_to_compute() -> None:
    def prefills(queued: int) -> list[str]:
        workers = worker("d0", DECODE), worker("p0", PREFILL), worker("p1", PREFILL, queued_prompt_tokens=queued)
        return route({P1: 640}, *workers)[1]

    assert (prefills(600), prefills(700)) == (["p1", "p0"], ["p0", "p1"])
