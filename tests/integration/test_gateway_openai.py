"""The HTTP API as OpenAI's own client sees it, over a decode worker that says a given text."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from fake_decode import FakeDecode
from gateway_fixture import TEXT, Stack, gateway, says, tokenizer

MODEL = "test-model"
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    async with gateway() as running:
        await running.add(says(cached_tokens=3))
        yield running


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with stack.client() as made:
        yield made


def _worker(stack: Stack) -> FakeDecode:
    return stack.workers[0]


# --- completions ------------------------------------------------------------------------------------------------------


async def test_completion_of_a_text(stack: Stack, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="Once upon", max_tokens=100, temperature=0, top_p=0.9, seed=7, extra_body={"top_k": 5}
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer().encode("Once upon"))
    assert answer.usage.completion_tokens == len(_worker(stack).token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    (request,) = _worker(stack).requests
    assert list(request.prompt_token_ids) == tokenizer().encode("Once upon")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_k) == (100, 0, 7, 5)
    assert sampling.top_p == pytest.approx(0.9)
    assert list(sampling.stop_token_ids) == list(tokenizer().eos_token_ids)


async def test_default_length_of_a_completion_is_16(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_token_ids_as_prompt(stack: Stack, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=1)
    assert list(_worker(stack).requests[0].prompt_token_ids) == [5, 6, 7]


@pytest.mark.parametrize("prompts", [["one", "two", "three"], [[1, 2], [3], [4, 5, 6]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_several_choices(
    stack: Stack, client: openai.AsyncOpenAI, prompts: list[str] | list[list[int]], stream: bool
) -> None:
    tokens = sum(len(tokenizer().encode(p)) if isinstance(p, str) else len(p) for p in prompts)
    if stream:
        texts = ["", "", ""]
        usage = None
        async for chunk in await client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=50, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=50)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert texts == [TEXT] * 3
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, 3 * len(_worker(stack).token_ids))
    assert len({request.request_id for request in _worker(stack).requests}) == 3


async def test_a_stream_is_whole_characters_and_ends_with_usage(client: openai.AsyncOpenAI) -> None:
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model=MODEL, prompt="x", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    ]
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) > 10
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_usage_has_none(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
    assert all([chunk.usage is None and chunk.choices async for chunk in stream])


@pytest.mark.parametrize("stop", ["is open", [" hours 👍🏽 日本", "is open"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_itself_and_the_work(
    stack: Stack, client: openai.AsyncOpenAI, stop: str | list[str], stream: bool
) -> None:
    if stream:
        chunks = [
            chunk.choices[0]
            async for chunk in await client.completions.create(
                model=MODEL, prompt="x", max_tokens=100, stop=stop, stream=True
            )
        ]
        text, reason = "".join(choice.text for choice in chunks), chunks[-1].finish_reason
    else:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop=stop)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(tokenizer().encode("The café is open"))
    assert (text, reason) == ("The café ", "stop")
    await _worker(stack).until(lambda: _worker(stack).running == 0)


async def test_ignore_eos_goes_on_to_max_tokens(stack: Stack, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=60, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    assert answer.choices[0].text.startswith(TEXT + "The café")
    assert list(_worker(stack).requests[0].sampling.stop_token_ids) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(client: openai.AsyncOpenAI, stream: bool) -> None:
    if stream:
        parts = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(
                model=MODEL, prompt=tokenizer().encode("Say: "), echo=True, max_tokens=90, stream=True
            )
        ]
        assert "".join(parts) == "Say: " + TEXT
    else:
        answer = await client.completions.create(model=MODEL, prompt="Say: ", echo=True, max_tokens=90)
        assert answer.choices[0].text == "Say: " + TEXT


async def test_log_probabilities_of_a_completion(stack: Stack, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["The", " café", " is", " open"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 3, 8, 11]
    assert logprobs.top_logprobs is not None
    assert all(len(best) == 2 for best in logprobs.top_logprobs)
    assert [best[token] for token, best in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)] == [-0.5] * 4
    assert _worker(stack).requests[0].sampling.logprobs == 2


async def test_half_a_character_in_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)


async def test_tokens_that_only_the_model_has_are_named_by_their_ids() -> None:
    """Many embeddings are padded beyond the tokenizer's vocabulary."""
    unknown = tokenizer().vocab_size + 5
    async with gateway() as stack, stack.client() as client:
        await stack.add(FakeDecode([*tokenizer().encode("hi"), unknown]))
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=9, logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == "hi" and logprobs is not None
        assert logprobs.tokens is not None and logprobs.tokens[-1] == f"token_id:{unknown}"
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=HI,  # type: ignore[arg-type]
            max_tokens=9,
            logprobs=True,
            top_logprobs=1,
        )
        content = chat.choices[0].logprobs
        assert content is not None and content.content is not None
        assert (content.content[-1].token, content.content[-1].bytes) == (f"token_id:{unknown}", [])


# --- chat -------------------------------------------------------------------------------------------------------------


async def test_a_chat_takes_the_models_template(stack: Stack, client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    answer = await client.chat.completions.create(model=MODEL, messages=messages)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion"
    (request,) = _worker(stack).requests
    assert list(request.prompt_token_ids) == tokenizer().encode_chat(messages)
    # No max_tokens: whatever the context leaves.
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


async def test_text_parts_and_the_newer_name_of_max_tokens(stack: Stack, client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_completion_tokens=3
    )
    (request,) = _worker(stack).requests
    assert list(request.prompt_token_ids) == tokenizer().encode_chat([{"role": "user", "content": "a\nb"}])
    assert request.sampling.max_tokens == 3


async def test_a_chat_stream(client: openai.AsyncOpenAI) -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == TEXT
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI, stream: bool) -> None:
    options = {"model": MODEL, "messages": HI, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    if stream:
        content = [
            entry
            async for chunk in await client.chat.completions.create(**options, stream=True)
            for choice in chunk.choices
            for entry in (choice.logprobs.content if choice.logprobs and choice.logprobs.content else [])
        ]
    else:
        answer = await client.chat.completions.create(**options)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
    raw = b"".join(bytes(entry.bytes or []) for entry in content)
    assert raw.decode() == TEXT + "<|im_end|>"
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeline_comes_if_asked_for(client: openai.AsyncOpenAI, stream: bool) -> None:
    extra = {"timeline": True}
    if stream:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=HI, stream=True, extra_body=extra
            )
        ]
        carried = [chunk.model_extra["baton_timeline"] for chunk in chunks if "baton_timeline" in chunk.model_extra]
        assert len(carried) == 1
        timeline = carried[0]
    else:
        answer = await client.chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
        timeline = answer.model_extra["baton_timeline"]
    assert timeline["decode_worker"] == "decode-0"
    assert timeline["reserve_us"] == 7
    assert timeline["inter_token_us"] == 1 << 40
    assert timeline["tokenize_us"] > 0


# --- models -----------------------------------------------------------------------------------------------------------


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in await client.models.list()]
    assert [(model.id, model.object, model.model_extra["max_model_len"]) for model in models] == [(MODEL, "model", 512)]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-17/large")


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_an_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="gpt-17", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "test-model" in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"stop": ["x"] * 17},
        {"stop": ""},
        {"presence_penalty": 1},
        {"prompt": ""},
        {"prompt": [49_152]},
        {"logprobs": 99},
        {"extra_body": {"nonsense": 1}},
        {"extra_body": {"max_tokens": "many"}},
    ],
    ids=str,
)
async def test_bad_parameters_are_400(stack: Stack, client: openai.AsyncOpenAI, options: dict[str, object]) -> None:
    options = {"prompt": "x"} | options
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, **options)
    assert caught.value.type == "invalid_request_error"
    assert not _worker(stack).requests


async def test_tools_are_refused_clearly(client: openai.AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        await client.chat.completions.create(model=MODEL, messages=HI, tools=[tool])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")


@pytest.mark.parametrize(("prompt", "limit"), [(511, 1), (1, 511), (500, 12)])
async def test_what_fits_the_context_is_served(client: openai.AsyncOpenAI, prompt: int, limit: int) -> None:
    await client.completions.create(model=MODEL, prompt=[5] * prompt, max_tokens=limit)


@pytest.mark.parametrize(("prompt", "limit"), [(512, 1), (511, 2), (1, 512), (600, None)])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_more_is_refused_with_the_numbers(
    client: openai.AsyncOpenAI, prompt: int, limit: int | None, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"{prompt} tokens.*512 tokens") as caught:
        await client.completions.create(model=MODEL, prompt=[5] * prompt, max_tokens=limit, stream=stream)
    assert caught.value.code == "context_length_exceeded"
