"""The HTTP rim: error objects, limits, ids, health, metrics, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from baton_gateway import http_middleware
from conditions import until
from fake_decode import FakeFailure
from gateway_fixture import Stack, gateway, says

MODEL = "test-model"


def _http(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.base_url, timeout=30)


def _error(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def test_every_refusal_is_an_openai_error_object() -> None:
    async with gateway() as stack, _http(stack) as http:
        await stack.add(says())
        json_type = {"content-type": "application/json"}
        post = "/v1/completions"
        for body in (b"{", b"[" * 100_000):
            assert _error(await http.post(post, content=body, headers=json_type), 400)["code"] == "invalid_json"
        assert "object" in str(_error(await http.post(post, content=b"[1]", headers=json_type), 400)["message"])
        assert _error(await http.post(post, json={"prompt": "x", "max_tokens": "5"}), 400)["param"] == "max_tokens"
        assert _error(await http.post(post, json={"prompt": "x", "temperature": 1e39}), 400)["param"] == "temperature"
        assert _error(await http.post("/v1/chat/completions", json={}), 400)["param"] == "messages"
        assert _error(await http.post(post, json={}), 400)["param"] == "prompt"
        surrogate = await http.post(post, content=b'{"prompt": "\\ud800"}', headers=json_type)
        assert _error(surrogate, 400)["code"] == "invalid_text"
        salt = await http.post(post, content=b'{"prompt": "x", "cache_salt": "\\ud800"}', headers=json_type)
        assert _error(salt, 400)["param"] == "cache_salt"
        assert _error(await http.get("/v1/nothing"), 404)["code"] == "not_found"
        assert _error(await http.get(post), 405)["code"] == "method_not_allowed"
        # No model named: the only one.
        assert (await http.post(post, json={"prompt": "x"})).status_code == 200


async def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_middleware.RequestEnvelope.__init__, "__defaults__", (1000, 0.2))
    async with gateway() as stack, _http(stack) as http:
        await stack.add(says())
        assert _error(await http.post("/v1/completions", json={"prompt": "x" * 2000}), 413)["code"] == "body_too_large"

        async def pieces() -> object:
            for _ in range(20):
                yield b"x" * 100

        assert _error(await http.post("/v1/completions", content=pieces()), 413)["code"] == "body_too_large"

        reader, writer = await asyncio.open_connection(*stack.gateway.http_address.split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readline(), 10)
        assert b"408" in head
        writer.close()
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_request_ids_are_ours_and_never_the_clients() -> None:
    async with gateway() as stack, _http(stack) as http:
        worker = says()
        await stack.add(worker)
        headers = {"x-request-id": "same"}
        responses = await asyncio.gather(
            *(http.post("/v1/completions", json={"prompt": "x"}, headers=headers) for _ in range(4))
        )
        told = {response.headers["x-request-id"] for response in responses}
        assert len(told) == 4
        assert told == {request.request_id for request in worker.requests}
        assert {response.json()["id"] for response in responses} == {"cmpl-" + i.removeprefix("req-") for i in told}
        assert (await http.get("/v1/nothing")).headers["x-request-id"].startswith("req-")


async def test_health_version_and_metrics() -> None:
    async with gateway(lease_ttl_s=60.0) as stack, _http(stack) as http:
        unhealthy = await http.get("/health")
        assert unhealthy.status_code == 503
        assert unhealthy.json()["reason"] == "NO_DECODE_WORKER"
        await stack.add(says())
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/version")).json()["version"]
        await http.post("/v1/completions", json={"prompt": "x"})
        text = (await http.get("/metrics")).text
        assert 'baton_gateway_requests_total{api="http",outcome="ok"} 1.0' in text
        assert 'baton_gateway_workers{role="colocated"} 1.0' in text
        assert 'baton_gateway_requests_in_flight{api="http"} 0.0' in text
        assert "baton_gateway_prompt_tokens_total 1.0" in text
        assert "baton_gateway_completion_tokens_total 16.0" in text


async def test_health_looks_at_progress() -> None:
    async with gateway(stall_s=0.2) as stack, _http(stack) as http:
        worker = says(gate=asyncio.Semaphore(1))
        await stack.add(worker)
        assert worker.gate is not None
        request = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await worker.until(lambda: worker.running == 1)
        health = stack.gateway.health
        await until(lambda: health.problem() is not None)
        response = await http.get("/health")
        assert (response.status_code, response.json()["reason"]) == (503, "NO_PROGRESS")
        for _ in range(50):
            worker.gate.release()
        assert (await request).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_too_many_requests_at_once() -> None:
    async with gateway(max_requests=2) as stack, _http(stack) as http:
        worker = says(gate=asyncio.Semaphore(0))
        await stack.add(worker)
        assert worker.gate is not None
        waiting = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"})) for _ in range(2)]
        await worker.until(lambda: worker.running == 2)
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            refused = await http.post("/v1/completions", json=body)
            assert _error(refused, 429)["code"] == "too_many_requests"
            assert refused.headers["retry-after"] == "1"
        for _ in range(100):
            worker.gate.release()
        assert [(await request).status_code for request in waiting] == [200, 200]
        assert (await http.post("/v1/completions", json={"prompt": ["x", "y"]})).status_code == 200
        assert _error(await http.post("/v1/completions", json={"prompt": ["x", "y", "z"]}), 429)
        assert stack.gateway.service.admission.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_limit_of_a_request(stream: bool) -> None:
    async with gateway(request_timeout_s=0.3) as stack, _http(stack) as http:
        worker = says(gate=asyncio.Semaphore(0))
        await stack.add(worker)
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert _error(response, 504)["type"] == "timeout_error"
        deadline = worker.deadlines[0]
        assert deadline is not None
        # The wire's clock has a grain of its own.
        assert deadline < 0.35
        await worker.until(lambda: worker.running == 0)


# --- errors of workers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "reason", "http_status"),
    [("RESOURCE_EXHAUSTED", "QUEUE_FULL", 429), ("INVALID_ARGUMENT", "EXCEEDS_PAGE_POOL", 400), ("INTERNAL", "X", 500)],
)
async def test_what_a_worker_refuses_is_passed_on(stream: bool, status: str, reason: str, http_status: int) -> None:
    async with gateway() as stack, _http(stack) as http:
        await stack.add(says(failure=FakeFailure(status, reason, "because")))
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        error = _error(response, http_status)
        assert (error["code"], error["message"]) == (reason.lower(), "because")


async def test_an_error_in_the_middle_of_a_stream_is_an_event_and_the_end() -> None:
    async with gateway() as stack, _http(stack) as http:
        worker = says(failure=FakeFailure("UNAVAILABLE", "ENGINE_UNAVAILABLE", "the model process died"), fail_after=3)
        await stack.add(worker)
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "The café is"
        assert json.loads(events[-1])["error"] == {
            "message": "the model process died",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_unavailable",
        }
        with pytest.raises(openai.APIError, match="the model process died"):
            async with stack.client() as client:
                async for _ in await client.completions.create(model=MODEL, prompt="x", stream=True):
                    pass
        # The first token was out: nobody tried again.
        assert len(worker.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_just_ends_is_an_error(stream: bool) -> None:
    async with gateway() as stack, _http(stack) as http:
        await stack.add(says(silent_end=True))
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert "decode_stream_broken" in response.text
        assert "[DONE]" not in response.text


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_leaves_cancels_the_work_at_once(
    stream: bool, tokens: int, prompt: str | list[str]
) -> None:
    count = 1 if isinstance(prompt, str) else len(prompt)
    async with gateway() as stack:
        worker = says(gate=asyncio.Semaphore(tokens * count))
        await stack.add(worker)
        reader, writer = await asyncio.open_connection(*stack.gateway.http_address.split(":"))
        body = json.dumps({"prompt": prompt, "stream": stream, "max_tokens": 100}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await worker.until(lambda: worker.running == count)
        if stream and tokens:
            await asyncio.wait_for(reader.readuntil(b"data: "), 10)
        writer.close()
        await worker.until(lambda: worker.running == 0)
        assert sorted(worker.cancelled) == sorted(request.request_id for request in worker.requests)
        assert worker.finished == []
        await until(lambda: stack.gateway.service.admission.in_flight == 0)
        assert stack.gateway.service.progress.waiting == 0
        async with _http(stack) as http:
            assert 'outcome="cancelled"} ' + str(float(count)) in (await http.get("/metrics")).text


async def test_a_client_that_leaves_while_waiting_for_a_worker() -> None:
    async with gateway(worker_wait_s=60.0) as stack:
        _, writer = await asyncio.open_connection(*stack.gateway.http_address.split(":"))
        body = b'{"prompt": "x"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        service = stack.gateway.service
        await until(lambda: service.progress.waiting == 1)
        writer.close()
        await until(lambda: service.progress.waiting == 0)
        assert service.admission.in_flight == 0


async def test_the_openai_client_closing_its_stream_cancels() -> None:
    async with gateway() as stack, stack.client() as client:
        worker = says(gate=asyncio.Semaphore(2))
        await stack.add(worker)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        await anext(stream)
        await stream.close()
        await worker.until(lambda: len(worker.cancelled) == 1)


async def test_small_writes_are_not_held_back() -> None:
    async with gateway() as stack, _http(stack) as http:
        await http.get("/version")
        server = stack.gateway._http._server
        assert server is not None
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
