"""Frames and messages between worker and model process."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.errors import FrameInvalid
from baton_engine.framing import MAX_FRAME, FrameDecoder, encode_frame
from baton_engine.messages import (
    AgentLost,
    Attach,
    EngineSpec,
    FromModel,
    Inspect,
    Load,
    Sampling,
    SequenceStart,
    StepItem,
    StepPlan,
    StepResult,
    ToModel,
)


@given(payloads=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts=st.lists(st.integers(0, 250)))
def test_frames_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(payload) for payload in payloads)
    decoder = FrameDecoder()
    found: list[bytes] = []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        found += decoder.feed(stream[start:end])
    assert found == payloads
    decoder.finish()


@pytest.mark.parametrize("head", [b"\0\0\0\0", b"\xff\xff\xff\xff", (MAX_FRAME + 1).to_bytes(4, "little")])
def test_an_impossible_length_is_garbage(head: bytes) -> None:
    with pytest.raises(FrameInvalid):
        FrameDecoder().feed(head)


def test_a_stream_may_not_end_inside_a_frame() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(b"abc")[:-1]) == []
    with pytest.raises(FrameInvalid, match="inside a frame"):
        decoder.finish()


@pytest.mark.parametrize("payload", [b"", bytes(MAX_FRAME + 1)])
def test_a_payload_that_no_decoder_would_take_is_not_sent(payload: bytes) -> None:
    with pytest.raises(FrameInvalid):
        encode_frame(payload)


PLAN = StepPlan(
    3,
    (StepItem(7, 10, (5,), True, False), StepItem(8, 0, (1, 2, 3), False, True)),
    (SequenceStart(8, (4, 5), None), SequenceStart(9, (6,), Sampling(0.5, 0.9, 20, 2**64 - 1, 3))),
    (1, 2),
)


@pytest.mark.parametrize(
    "message",
    [PLAN, Load(EngineSpec(model_path="m.gguf", pages=4, cpus=(1,))), Attach("/run/agent.sock", 2**64 - 1), Inspect()],
)
def test_messages_to_the_model_process_come_back_equal(message: ToModel) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToModel) == message


def test_messages_from_the_model_process_come_back_equal() -> None:
    for message in (StepResult(3, (1,), (None,), 1, 2, 3, 4, (5, 6)), AgentLost(9)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromModel) == message


def test_a_decode_step_is_a_tiny_message() -> None:
    plan = StepPlan(1000, tuple(StepItem(2**31 + index, 2000, (49_000,), True, False) for index in range(32)))
    assert len(msgspec.msgpack.encode(plan)) <= 32 * 16


def test_a_plan_tells_its_prompt_chunks_and_tokens() -> None:
    assert [(item.sequence_id, item.start, item.end) for item in PLAN.prefills] == [(8, 0, 3)]
    assert PLAN.tokens == 4
