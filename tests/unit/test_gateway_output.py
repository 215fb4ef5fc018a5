"""From tokens to the text a client may see."""

from __future__ import annotations

from functools import lru_cache

import pytest
from baton.v1 import common_pb2, decode_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_gateway.output import Increment, OutputAssembler
from baton_tokenizer import Tokenizer, load_tokenizer
from tokenizer_samples import default_model

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
EOS = 2


@lru_cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(default_model())


def _final(reason: common_pb2.FinishReason.ValueType = LENGTH, **fields: object) -> decode_pb2.DecodeGenerateResponse:
    return decode_pb2.DecodeGenerateResponse(finish_reason=reason, **fields)  # type: ignore[arg-type]


def _run(
    ids: list[int], stop: tuple[str, ...] = (), ends: tuple[int, ...] = (EOS,), sizes: tuple[int, ...] = (1,)
) -> tuple[str, list[int], Increment]:
    """Text, token ids, last increment."""
    assembler = OutputAssembler(tokenizer(), 7, stop, ends)
    text, tokens, position, step = "", [], 0, 0
    while position < len(ids):
        size = sizes[step % len(sizes)]
        increment = assembler.take(decode_pb2.DecodeGenerateResponse(token_ids=ids[position : position + size]))
        position, step = position + size, step + 1
        text += increment.text
        tokens += increment.token_ids
        if increment.finished:
            return text, tokens, increment
    increment = assembler.take(_final())
    return text + increment.text, tokens, increment


@settings(max_examples=100)
@given(text=st.text(max_size=30), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_without_stops_all_text_comes_out(text: str, sizes: list[int]) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    out, tokens, last = _run(ids, ends=(), sizes=tuple(sizes))
    assert out == tokenizer().decode(ids)
    assert tokens == ids
    assert last.usage.completion_tokens == len(ids)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), stop=st.sampled_from(["lo w", "o", "🙂", "ld"]))
def test_a_stop_string_cuts_at_the_same_place_however_tokens_arrive(sizes: list[int], stop: str) -> None:
    text = "hello wörld 🙂 old"
    out, tokens, last = _run(tokenizer().encode(text), (stop,), sizes=tuple(sizes))
    assert out == text[: text.index(stop)]
    assert last.finish_reason == STOP
    assert last.usage.completion_tokens == len(tokens)
    # Nothing after the token that completed the stop string.
    assert stop in tokenizer().decode(tokens)
    assert stop not in tokenizer().decode(tokens[:-1])


def test_a_stop_string_ends_with_what_the_worker_told_last() -> None:
    assembler = OutputAssembler(tokenizer(), 7, ("lo",), (EOS,))
    hel, lo = tokenizer().encode("hel"), tokenizer().encode("lo")
    told = {"usage": {"cached_tokens": 5}, "timeline": {"reserve_us": 3, "prefill_worker": "p0"}}
    assert not assembler.take(decode_pb2.DecodeGenerateResponse(token_ids=hel, **told)).finished  # type: ignore[arg-type]
    last = assembler.take(decode_pb2.DecodeGenerateResponse(token_ids=lo))
    assert last.finish_reason == STOP
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (7, 5)
    assert last.usage.completion_tokens == len(hel) + len(lo)
    assert (last.timeline.reserve_us, last.timeline.prefill_worker) == (3, "p0")


def test_an_end_token_counts_but_is_no_text() -> None:
    newline = tokenizer().encode("\n")[0]
    out, tokens, last = _run([*tokenizer().encode("hi"), newline], ends=(EOS, newline))
    assert out == "hi"
    assert tokens[-1] == newline
    assert last.usage.completion_tokens == 2


def test_ignored_end_tokens_are_skipped_as_special() -> None:
    hi = tokenizer().encode("hi")
    assert _run([*hi, EOS, *hi], ends=())[0] == "hihi"


def test_an_unfinished_character_and_held_text_come_with_the_end() -> None:
    broken = tokenizer().encode("𓀀")[:-1]
    out, _, last = _run([*tokenizer().encode("EN"), *broken], ("END",))
    assert out.startswith("EN\ufffd")
    assert last.finish_reason == LENGTH


def test_usage_and_timeline_are_the_workers_but_for_the_counts() -> None:
    assembler = OutputAssembler(tokenizer(), 7, (), ())
    assembler.take(decode_pb2.DecodeGenerateResponse(token_ids=[100, 101]))
    last = assembler.take(
        _final(
            usage=common_pb2.Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=5),
            timeline=common_pb2.Timeline(reserve_us=3),
        )
    )
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (7, 2, 5)
    assert last.timeline.reserve_us == 3


def test_tokens_in_the_last_message_are_taken_too() -> None:
    assembler = OutputAssembler(tokenizer(), 7, (), (EOS,))
    last = assembler.take(_final(STOP, token_ids=[*tokenizer().encode("bye"), EOS]))
    assert (last.text, last.finish_reason) == ("bye", STOP)


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_stay_with_their_tokens_up_to_the_stop(count: int) -> None:
    ids = tokenizer().encode("one two three")
    logprobs = [
        common_pb2.PositionLogprobs(sampled=common_pb2.TokenLogprob(token_id=token, logprob=-1.0)) for token in ids
    ]
    assembler = OutputAssembler(tokenizer(), 7, (" two",), ())
    increment = assembler.take(decode_pb2.DecodeGenerateResponse(token_ids=ids[:count], logprobs=logprobs[:count]))
    assert [position.sampled.token_id for position in increment.logprobs] == increment.token_ids == ids[: min(count, 2)]
