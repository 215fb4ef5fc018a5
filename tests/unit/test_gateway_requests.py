"""What is a valid request, and what is refused by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from baton.v1 import common_pb2
from pydantic import ValidationError

from baton_gateway.errors import ContextLengthExceeded, InvalidRequest, Overloaded, UnsupportedParameter
from baton_gateway.http_errors import from_validation, to_http
from baton_gateway.http_stream import ClientGone, merged, until_client_leaves
from baton_gateway.openai_responses import timeline_json
from baton_gateway.openai_schema import ChatRequest, CompletionRequest
from baton_gateway.requests import check_cache_salt, check_prompt, check_sampling, check_stop, fit_to_context
from baton_gateway.service import Admission, Progress
from baton_rpc import RemoteError


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
    ],
)
def test_sampling_out_of_range(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(common_pb2.SamplingParams(max_tokens=1, **fields), 100)
    assert caught.value.param == param


def test_sampling_at_its_bounds() -> None:
    check_sampling(common_pb2.SamplingParams(temperature=0, top_p=1, logprobs=20, stop_token_ids=[0, 99]), 100)
    check_sampling(common_pb2.SamplingParams(), 100)


@pytest.mark.parametrize("stop", [["a"] * 17, ["a", ""], ["x" * 1025]])
def test_stops_that_are_refused(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        check_stop(stop)


def test_a_cache_salt_is_text() -> None:
    assert check_cache_salt("\0 é 😀") == "\0 é 😀"
    with pytest.raises(InvalidRequest, match="cache_salt holds a lone surrogate"):
        check_cache_salt("a\ud800")


@pytest.mark.parametrize("ids", [[], [-1], [5, 100]])
def test_prompts_that_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        check_prompt(ids, 100)


@pytest.mark.parametrize(
    ("prompt", "wanted", "given"), [(511, 1, 1), (511, 0, 1), (1, 511, 511), (100, 0, 300), (500, 0, 12), (500, 12, 12)]
)
def test_what_fits_the_context(prompt: int, wanted: int, given: int) -> None:
    assert fit_to_context(prompt, wanted, 512, default=300) == given


@pytest.mark.parametrize(("prompt", "wanted"), [(512, 0), (512, 1), (511, 2), (500, 13), (9999, 1)])
def test_one_token_more_is_refused_with_numbers(prompt: int, wanted: int) -> None:
    with pytest.raises(ContextLengthExceeded, match="512") as caught:
        fit_to_context(prompt, wanted, 512)
    assert caught.value.fields["prompt_tokens"] == str(prompt)


# --- OpenAI's parameters ----------------------------------------------------------------------------------------------


def _completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x"} | fields)


def _chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 2},
        {"frequency_penalty": 0.5},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"suffix": "end"},
        {"reasoning_effort": "high"},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(UnsupportedParameter, match=name) as caught:
        _completion(**fields).check_supported()
    assert caught.value.param == name


def test_what_changes_nothing_is_taken() -> None:
    _completion(
        n=1, best_of=1, frequency_penalty=0, presence_penalty=0.0, tools=[], logit_bias={}, suffix=None, user="u"
    ).check_supported()
    _chat(
        response_format={"type": "text"}, metadata={"a": "b"}, parallel_tool_calls=True, store=False
    ).check_supported()


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="temprature") as caught:
        _completion(temprature=1).check_supported()
    assert caught.value.param == "temprature"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a"], 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2), ("", 1)],
)
def test_shapes_of_prompts(prompt: object, count: int) -> None:
    assert len(_completion(prompt=prompt).prompts()) == count


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {}, ["a", 1], [[1], "a"], [[]], [[1], []], [1.5], [True], [[1], [None]], ["a"] * 65]
)
def test_shapes_that_are_no_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        _completion(prompt=prompt).prompts()


def test_defaults_differ_between_the_two_kinds() -> None:
    assert _completion().completion_sampling().max_tokens == 16
    assert _chat().chat_sampling().max_tokens == 0
    assert _chat(max_tokens=5).chat_sampling().max_tokens == 5
    assert _chat(max_tokens=5, max_completion_tokens=6).chat_sampling().max_tokens == 6


@pytest.mark.parametrize("value", [0, -1, 1 << 40])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_at_least_one(name: str, value: int) -> None:
    with pytest.raises(InvalidRequest, match=name):
        _chat(**{name: value}).chat_sampling()


def test_sampling_parameters_are_carried_over() -> None:
    params = _completion(
        temperature=0, top_p=0.5, top_k=3, seed=-1, ignore_eos=True, stop_token_ids=[7], logprobs=0
    ).completion_sampling()
    assert params.HasField("temperature")
    assert params.temperature == 0
    assert (params.top_p, params.top_k, params.seed) == (0.5, 3, (1 << 64) - 1)
    assert params.ignore_eos
    assert list(params.stop_token_ids) == [7]
    assert params.HasField("logprobs")
    unset = _completion(top_k=-1).completion_sampling()
    assert not any(unset.HasField(name) for name in ("temperature", "top_p", "top_k", "seed", "logprobs"))


@pytest.mark.parametrize(
    "fields", [{"seed": 1 << 64}, {"top_k": -2}, {"logprobs": 21}, {"logprobs": -1}, {"logprobs": 1, "echo": True}]
)
def test_completion_values_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        _completion(**fields).completion_sampling()


def test_chat_logprobs() -> None:
    assert not _chat().chat_sampling().HasField("logprobs")
    assert _chat(logprobs=True).chat_sampling().logprobs == 0
    assert _chat(logprobs=True, top_logprobs=4).chat_sampling().logprobs == 4
    with pytest.raises(InvalidRequest):
        _chat(top_logprobs=4).chat_sampling()


def test_messages_become_roles_and_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = _chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "n"}])
    assert request.conversation() == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], InvalidRequest),
        ([{"role": "user"}], InvalidRequest),
        ([{"role": "user", "content": []}], InvalidRequest),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidRequest),
        ([{"role": "wizard", "content": "x"}], InvalidRequest),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], UnsupportedParameter),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], UnsupportedParameter),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], UnsupportedParameter),
    ],
)
def test_messages_that_are_refused(messages: list[Any], error: type[InvalidRequest]) -> None:
    with pytest.raises(error, match="messages"):
        _chat(messages=messages).conversation()


def test_stream_options_need_a_stream() -> None:
    _completion(stream=True, stream_options={"include_usage": True}).check_supported()
    with pytest.raises(InvalidRequest):
        _completion(stream_options={"include_usage": True}).check_supported()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stream": 1}, "stream"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_wrong_types_are_told_by_the_parameters_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _chat(**fields)
    error = from_validation([entry | {"loc": ("body", *entry["loc"])} for entry in caught.value.errors()])
    assert (error.status, error.param) == (400, param)
    assert param in error.message


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "http"),
    [
        ("INVALID_ARGUMENT", 400),
        ("NOT_FOUND", 404),
        ("RESOURCE_EXHAUSTED", 429),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
        ("INTERNAL", 500),
        ("FAILED_PRECONDITION", 500),
        ("DATA_LOSS", 500),
    ],
)
def test_statuses(status: str, http: int) -> None:
    error = to_http(RemoteError(status, "what", "WHY_SO"))
    assert (error.status, error.code, error.message) == (http, "why_so", "what")
    assert ("retry-after" in error.headers()) == (http in (429, 503))
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_exception_tells_nothing_about_itself() -> None:
    error = to_http(ValueError("secret"))
    assert error.status == 500
    assert "secret" not in str(error.body())


# --- small pure parts -------------------------------------------------------------------------------------------------


def test_admission_is_all_or_nothing_and_gives_back() -> None:
    admission = Admission(3)
    with admission.admit(2):
        with pytest.raises(Overloaded) as caught, admission.admit(2):
            pass
        assert caught.value.fields == {"in_flight": "2", "limit": "3"}
        with admission.admit():
            assert admission.in_flight == 3
    assert admission.in_flight == 0


def test_progress_is_about_what_waits_for_workers() -> None:
    progress = Progress()
    assert progress.idle_for(1000.0) == 0
    progress.wait(1000.0)
    assert progress.idle_for(1005.0) == 5
    progress.wait(1005.0)
    assert progress.idle_for(1010.0) == 10
    progress.moved(1010.0)
    assert progress.idle_for(1011.0) == 1
    progress.moved(1012.0)
    # The clients have the word now, and may be slow.
    assert progress.idle_for(9999.0) == 0
    progress.wait(9999.0)
    assert progress.idle_for(10_000.0) == 1


def test_a_timeline_as_json_has_numbers_and_every_field() -> None:
    timeline = common_pb2.Timeline(route_us=1 << 40, chunks=[common_pb2.ChunkTiming(tokens=5, compute_us=6)])
    value = timeline_json(timeline)
    assert value["route_us"] == 1 << 40
    assert value["chunks"] == [{"tokens": 5, "compute_us": 6}]
    assert value["transfer"]["bytes"] == 0
    assert set(value) == {field.name for field in common_pb2.Timeline.DESCRIPTOR.fields}


# --- streams ----------------------------------------------------------------------------------------------------------


class Source:
    """Counts to `end`, then stops or fails; knows whether it was closed."""

    def __init__(self, end: int, failure: Exception | None = None) -> None:
        self.end, self.failure, self.closed = end, failure, False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.end):
                yield number
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed = True


@pytest.mark.parametrize("counts", [[3], [0, 0], [1, 5, 40], [30, 30]])
async def test_merged_streams_lose_nothing_and_keep_each_order(counts: list[int]) -> None:
    seen: dict[int, list[int]] = {index: [] for index in range(len(counts))}
    async for index, item in merged([Source(count).items() for count in counts]):
        seen[index].append(item)
    assert seen == {index: list(range(count)) for index, count in enumerate(counts)}


@pytest.mark.parametrize("others", [0, 1, 2])
async def test_one_failure_ends_all_merged_streams(others: int) -> None:
    sources = [Source(2, KeyError("x")), *(Source(10**9) for _ in range(others))]
    with pytest.raises(KeyError):
        async for _ in merged([source.items() for source in sources]):
            pass
    assert all(source.closed for source in sources)


async def test_closing_the_merged_stream_closes_all() -> None:
    sources = [Source(10**9), Source(10**9)]
    stream = merged([source.items() for source in sources])
    await anext(stream)
    await stream.aclose()
    assert all(source.closed for source in sources)


async def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves() -> None:
    events: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return next(messages)

    with pytest.raises(ClientGone):
        await until_client_leaves(receive, work())
    assert events == ["cleaned up"]


async def test_work_that_is_done_is_returned() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> int:
        return 5

    assert await until_client_leaves(receive, work()) == 5
