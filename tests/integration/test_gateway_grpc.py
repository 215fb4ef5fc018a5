"""The public gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from baton.v1 import common_pb2, inference_pb2, registry_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton_rpc import RemoteError
from conditions import until
from gateway_fixture import TEXT, Stack, gateway, says, tokenizer


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    async with gateway() as running:
        yield running


def _request(text: str = "hi", max_tokens: int = 100, **fields: object) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    return inference_pb2.GenerateRequest(text=text, sampling=sampling, **fields)  # type: ignore[arg-type]


async def _refusal(call: object) -> RemoteError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:  # type: ignore[attr-defined]
            pass
    return RemoteError.from_rpc(caught.value)


async def test_generate_streams_text_and_ends_with_usage_and_timeline(stack: Stack) -> None:
    worker = says(cached_tokens=2)
    await stack.add(worker)
    responses = [response async for response in stack.inference.Generate(_request(client_request_id="mine"))]
    assert "".join(response.text for response in responses) == TEXT
    assert [i for response in responses for i in response.token_ids] == list(worker.token_ids)
    assert len({response.request_id for response in responses}) == 1
    assert responses[0].request_id == worker.requests[0].request_id != "mine"
    last = responses[-1]
    assert all(response.finish_reason == 0 and not response.HasField("usage") for response in responses[:-1])
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (
        len(tokenizer().encode("hi")),
        len(worker.token_ids),
        2,
    )
    assert last.timeline.decode_worker == "decode-0"
    assert last.timeline.reserve_us == 7
    assert last.timeline.tokenize_us > 0


async def test_two_clients_with_the_same_id_do_not_meet(stack: Stack) -> None:
    worker = says()
    await stack.add(worker)

    async def one() -> str:
        call = stack.inference.Generate(_request(client_request_id="same"))
        return "".join([response.text async for response in call])

    assert await asyncio.gather(one(), one()) == [TEXT, TEXT]
    assert len({request.request_id for request in worker.requests}) == 2


async def test_token_ids_and_chats_as_prompts_and_stops(stack: Stack) -> None:
    worker = says()
    await stack.add(worker)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    sampling = common_pb2.SamplingParams(max_tokens=50, logprobs=1)
    texts = []
    for prompt in ({"token_ids": inference_pb2.TokenIds(ids=[4, 5])}, {"chat": chat}):
        request = inference_pb2.GenerateRequest(sampling=sampling, stop=["24 "], **prompt)  # type: ignore[arg-type]
        responses = [response async for response in stack.inference.Generate(request)]
        texts.append("".join(response.text for response in responses))
        assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert texts == ["The café is open — "] * 2
    assert list(worker.requests[0].prompt_token_ids) == [4, 5]
    assert list(worker.requests[1].prompt_token_ids) == tokenizer().encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (_request(model="other"), "NOT_FOUND", "MODEL_NOT_FOUND"),
        (_request(text=""), "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (_request(stop=[""]), "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (_request(max_tokens=512), "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
        (inference_pb2.GenerateRequest(sampling={"max_tokens": 1}), "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (inference_pb2.GenerateRequest(sampling={"max_tokens": 1}, chat={}), "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (
            inference_pb2.GenerateRequest(sampling={"max_tokens": 1}, token_ids={"ids": [49_152]}),
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
        ),
    ],
)
async def test_refusals_are_typed(
    stack: Stack, request_: inference_pb2.GenerateRequest, status: str, reason: str
) -> None:
    worker = says()
    await stack.add(worker)
    error = await _refusal(stack.inference.Generate(request_))
    assert (error.status, error.reason) == (status, reason)
    assert worker.requests == []


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(5, 40), (500, 12)])
async def test_without_max_tokens_the_gateways_default_holds_as_far_as_the_context_allows(
    prompt_tokens: int, expected: int
) -> None:
    async with gateway(default_max_tokens=40) as stack:
        worker = says()
        await stack.add(worker)
        request = inference_pb2.GenerateRequest(token_ids={"ids": [4] * prompt_tokens})  # type: ignore[arg-type]
        assert [response async for response in stack.inference.Generate(request)]
        assert worker.requests[0].sampling.max_tokens == expected


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(5, 28), (32, 1), (40, 1)])
async def test_the_default_is_no_more_than_the_workers_pages_hold(prompt_tokens: int, expected: int) -> None:
    """A client that names no limit must not be refused for one; a prompt that is too long is the worker's to refuse."""
    async with gateway(default_max_tokens=40) as stack:
        worker = says()
        await stack.add(worker, load=registry_pb2.WorkerLoad(total_pages=2, free_pages=2))
        request = inference_pb2.GenerateRequest(token_ids={"ids": [4] * prompt_tokens})  # type: ignore[arg-type]
        assert [response async for response in stack.inference.Generate(request)]
        assert worker.requests[0].sampling.max_tokens == expected


async def test_no_worker_is_unavailable_with_the_reason(stack: Stack) -> None:
    error = await _refusal(stack.inference.Generate(_request()))
    assert (error.status, error.reason) == ("UNAVAILABLE", "NO_DECODE_WORKER")


@pytest.mark.parametrize("tokens", [0, 3])
async def test_cancelling_a_call_cancels_the_worker(stack: Stack, tokens: int) -> None:
    worker = says(gate=asyncio.Semaphore(tokens))
    await stack.add(worker)
    call = stack.inference.Generate(_request())
    for _ in range(tokens):
        await call.read()
    await worker.until(lambda: worker.running == 1)
    call.cancel()
    await worker.until(lambda: len(worker.cancelled) == 1)
    await until(lambda: stack.gateway.service.admission.in_flight == 0)


async def test_a_clients_deadline_reaches_the_worker(stack: Stack) -> None:
    worker = says(gate=asyncio.Semaphore(0))
    await stack.add(worker)
    error = await _refusal(stack.inference.Generate(_request(), timeout=0.5))
    assert error.status == "DEADLINE_EXCEEDED"
    deadline = worker.deadlines[0]
    assert deadline is not None
    # The wire's clock has a grain of its own.
    assert deadline < 0.55
    await worker.until(lambda: worker.running == 0)


async def test_a_full_gateway_refuses() -> None:
    async with gateway(max_requests=1) as stack:
        worker = says(gate=asyncio.Semaphore(0))
        await stack.add(worker)
        call = stack.inference.Generate(_request())
        await worker.until(lambda: worker.running == 1)
        error = await _refusal(stack.inference.Generate(_request()))
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
        call.cancel()


async def test_tokenize_and_models(stack: Stack) -> None:
    models = await stack.inference.Models(inference_pb2.ModelsRequest())
    assert [(model.id, model.max_model_len) for model in models.models] == [("test-model", 0)]
    await stack.add(says())
    answer = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(text="\n\n1."))
    assert list(answer.token_ids) == tokenizer().encode("\n\n1.")
    assert answer.max_model_len == 512
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    answer = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert list(answer.token_ids) == tokenizer().encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.inference.Tokenize(inference_pb2.TokenizeRequest())


async def test_health_follows_the_workers_and_reflection_answers(stack: Stack) -> None:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    statuses: list[int] = []
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))

    async def until(status: int) -> None:
        async for response in watch:
            statuses.append(response.status)
            if response.status == status:
                return

    await asyncio.wait_for(until(health_pb2.HealthCheckResponse.NOT_SERVING), 10)
    await stack.add(says())
    await asyncio.wait_for(until(health_pb2.HealthCheckResponse.SERVING), 10)
    watch.cancel()
    call = reflection_pb2_grpc.ServerReflectionStub(stack.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    listed = [service.name async for answer in call for service in answer.list_services_response.service]
    assert "baton.v1.Inference" in listed
    assert "baton.v1.Registry" not in listed
