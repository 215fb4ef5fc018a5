"""The gateway and its workers: leases, failures before the first token, and what the process may not hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc
import openai
import pytest
from baton.v1 import registry_pb2, registry_pb2_grpc

from baton_gateway.routing import DECODE, PREFILL
from baton_rpc import RemoteError, open_channel
from conditions import until
from fake_decode import FakeFailure, deregister, register, worker_info
from gateway_fixture import TEXT, Stack, gateway, says
from tokenizer_samples import default_model

GONE = FakeFailure("UNAVAILABLE", "ENGINE_UNAVAILABLE", "gone")


async def _ask(stack: Stack, prompt: str = "x y z") -> str:
    async with stack.client() as client:
        answer = await client.completions.create(model="test-model", prompt=prompt, max_tokens=100)
        return answer.choices[0].text


async def test_registering_renewing_listing_leaving() -> None:
    async with gateway() as stack, open_channel(stack.gateway.registry_address) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        answer = await stub.Register(registry_pb2.RegisterRequest(worker=worker_info("a")))
        assert answer.ttl_ms == 60_000
        load = registry_pb2.WorkerLoad(running_requests=3)
        await stub.Renew(registry_pb2.RenewRequest(lease=answer.lease, load=load))
        listed = await stub.List(registry_pb2.ListRequest())
        assert [(worker.worker_id, worker.load.running_requests) for worker in listed.workers] == [("a", 3)]
        await stub.Deregister(registry_pb2.DeregisterRequest(lease=answer.lease))
        assert not (await stub.List(registry_pb2.ListRequest())).workers
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(registry_pb2.RenewRequest(lease=answer.lease))
        assert RemoteError.from_rpc(caught.value).reason == "LEASE_NOT_FOUND"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(registry_pb2.RegisterRequest())
        assert RemoteError.from_rpc(caught.value).reason == "INVALID_WORKER"


async def test_a_silent_worker_is_tidied_away_without_any_request() -> None:
    async with gateway(lease_ttl_s=0.3) as stack:
        await stack.add(says())
        metrics = stack.gateway.metrics
        value = metrics.leases_expired.labels(role="colocated")._value
        await until(lambda: value.get() == 1.0)
        assert stack.gateway.cluster.workers() == []


async def test_a_gateway_that_cannot_tidy_up_ends_instead_of_serving_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lease_ttl_s=0.1) as stack:

        def broken() -> None:
            raise ValueError("broken")

        monkeypatch.setattr(stack.gateway.cluster, "_expire", broken)
        joining = asyncio.create_task(stack.gateway.join())
        await stack.add(says())
        with pytest.raises(ValueError, match="broken"):
            await asyncio.wait_for(joining, 10)


async def test_a_request_waits_for_a_worker_to_come() -> None:
    async with gateway(worker_wait_s=30.0) as stack:
        request = asyncio.create_task(_ask(stack))
        await until(lambda: stack.gateway.service.progress.waiting == 1)
        await stack.add(says())
        assert await request == TEXT


async def test_and_not_for_ever() -> None:
    async with gateway(worker_wait_s=0.2) as stack:
        with pytest.raises(openai.InternalServerError) as caught:
            await _ask(stack)
        assert (caught.value.status_code, caught.value.code) == (503, "no_decode_worker")
        assert caught.value.response.headers["retry-after"] == "1"


async def test_a_decode_worker_alone_is_not_enough() -> None:
    async with gateway() as stack:
        worker = says()
        await stack.add(worker, role=DECODE)
        with pytest.raises(openai.InternalServerError) as caught:
            await _ask(stack)
        assert caught.value.code == "no_prefill_worker"
        await register(stack.gateway.registry_address, worker_info("p0", role=PREFILL))
        await register(stack.gateway.registry_address, worker_info("p1", role=PREFILL, fingerprint="other"))
        assert await _ask(stack) == TEXT
        (request,) = worker.requests
        assert [prefill.worker_id for prefill in request.prefill_workers] == ["p0"]
        assert request.prefill_workers[0].HasField("agent")


async def test_another_decode_worker_is_tried_before_the_first_token() -> None:
    async with gateway() as stack:
        broken, sound = says(worker_id="a", failure=GONE), says(worker_id="b")
        await stack.add(broken)
        await stack.add(sound)
        assert [await _ask(stack) for _ in range(4)] == [TEXT] * 4
        assert broken.requests
        assert len(sound.requests) == 4
        # Each attempt has an id of its own: the former one may still be alive somewhere.
        ids = [request.request_id for request in (*broken.requests, *sound.requests)]
        assert len(set(ids)) == len(ids)


async def test_a_worker_that_is_not_there_at_all_counts_as_failed() -> None:
    async with gateway() as stack:
        absent = says(worker_id="a")
        await stack.add(absent)
        await absent.stop()
        await stack.add(says(worker_id="b"))
        assert [await _ask(stack) for _ in range(2)] == [TEXT] * 2


async def test_attempts_are_bounded_and_end_in_the_workers_own_error() -> None:
    async with gateway() as stack:
        for name in "abcde":
            await stack.add(says(worker_id=name, failure=GONE))
        with pytest.raises(openai.InternalServerError) as caught:
            await _ask(stack)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
        assert sum(len(worker.requests) for worker in stack.workers) == 3


async def test_other_errors_are_not_tried_elsewhere() -> None:
    async with gateway() as stack:
        for name in "ab":
            await stack.add(says(worker_id=name, failure=FakeFailure("RESOURCE_EXHAUSTED", "QUEUE_FULL")))
        with pytest.raises(openai.RateLimitError):
            await _ask(stack)
        assert sum(len(worker.requests) for worker in stack.workers) == 1


async def test_load_is_spread_at_once_before_any_report() -> None:
    async with gateway() as stack:
        workers = [says(worker_id=name, gate=asyncio.Semaphore(0)) for name in "abc"]
        for worker in workers:
            await stack.add(worker)
        requests = [asyncio.create_task(_ask(stack)) for _ in range(9)]
        for worker in workers:
            await worker.until(lambda worker=worker: worker.running == 3)
            for _ in range(200):
                worker.gate.release()
        assert await asyncio.gather(*requests) == [TEXT] * 9


async def test_what_a_worker_serves_outlives_its_lease() -> None:
    async with gateway() as stack:
        worker = says(gate=asyncio.Semaphore(2))
        lease = await stack.add(worker)
        request = asyncio.create_task(_ask(stack))
        await worker.until(lambda: worker.running == 1)
        await deregister(stack.gateway.registry_address, lease)
        assert stack.gateway.cluster.workers() == []
        for _ in range(200):
            worker.gate.release()
        assert await request == TEXT


async def test_a_restarted_worker_on_another_port_is_found() -> None:
    async with gateway() as stack:
        first = says(worker_id="a")
        await stack.add(first)
        assert await _ask(stack) == TEXT
        await first.stop()
        second = says(worker_id="a", incarnation=2)
        await stack.add(second)
        assert await _ask(stack) == TEXT
        assert len(second.requests) == 1


async def test_the_process_holds_neither_torch_nor_the_fabric() -> None:
    code = """
import asyncio, sys
from baton_config import load_settings
from baton_gateway.main import Gateway
from baton_tokenizer import load_tokenizer

async def main():
    free = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "registry": "127.0.0.1:0"}
    gateway = Gateway(load_settings({"gateway": free}), load_tokenizer(sys.argv[1]))
    await gateway.start()
    await gateway.stop()

asyncio.run(main())
forbidden = ("torch", "baton_fabric", "baton_model", "baton_engine", "transformers")
print([name for name in forbidden if name in sys.modules])
"""
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, str(default_model())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


async def test_a_signal_ends_the_process_in_bounded_time_while_a_stream_is_open() -> None:
    code = """
import asyncio, logging
from baton_config import load_settings
from baton_gateway.main import run

logging.basicConfig(level="INFO")
free = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "registry": "127.0.0.1:0"}
asyncio.run(run(load_settings({"gateway": free, "model": {"served_name": "test-model"}})))
"""
    worker = says(gate=asyncio.Semaphore(1))
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        log = (await asyncio.wait_for(process.stderr.readuntil(b"registry on 127.0.0.1:"), 60)).decode()
        registry = "127.0.0.1:" + (await process.stderr.readline()).decode().strip()
        http = log.split("HTTP on ")[1].split(",")[0]
        await register(registry, worker_info(worker.worker_id, worker.address))
        async with openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="test-model", prompt="x", stream=True)
            await anext(stream)
            whole = asyncio.create_task(client.completions.create(model="test-model", prompt="x"))
            await worker.until(lambda: worker.running == 2)
            process.terminate()
            with pytest.raises(openai.APIError, match="shutting down"):
                await anext(stream)
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                await whole
            assert caught.value.status_code == 503
            rest = await asyncio.wait_for(process.stderr.read(), 30)
        assert await asyncio.wait_for(process.wait(), 30) == 0, rest.decode()
        assert "Traceback" not in log + rest.decode()
        await worker.until(lambda: len(worker.cancelled) == 2)
    finally:
        await worker.stop()
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("routed", [True, False])
async def test_a_conversation_stays_with_the_worker_that_has_its_beginning(routed: bool) -> None:
    async with gateway(prefix_routing=routed) as stack:
        workers = [says(worker_id=f"c{number}") for number in range(2)]
        for worker in workers:
            await stack.add(worker)
        async with stack.client() as client:
            prompts = [[7 + number] * 80 for number in range(4)]
            for turn in range(3):
                for prompt in prompts:
                    await client.completions.create(
                        model="test-model", prompt=prompt + [3] * turn, max_tokens=4, extra_body={"cache_salt": "s"}
                    )
        served = [[request.prompt_token_ids[0] for request in worker.requests] for worker in workers]
        assert {request.cache_salt for worker in workers for request in worker.requests} == {"s"}
        assert sorted(map(len, served)) == [6, 6]
        if routed:
            assert not set(served[0]) & set(served[1])


async def test_requests_with_one_beginning_at_once_are_shared_out_all_the_same() -> None:
    async with gateway() as stack:
        workers = [says(worker_id=f"c{number}") for number in range(2)]
        for worker in workers:
            await stack.add(worker)
        prompt = [7] * 80
        async with stack.client() as client:
            await client.completions.create(model="test-model", prompt=prompt, max_tokens=4)
            for worker in workers:
                worker.gate = asyncio.Semaphore(0)
            asked = [
                asyncio.create_task(client.completions.create(model="test-model", prompt=prompt, max_tokens=4))
                for _ in range(12)
            ]
            await until(lambda: sum(worker.running for worker in workers) == 12)
            assert min(worker.running for worker in workers) >= 4
            for worker in workers:
                assert worker.gate is not None
                for _ in range(100):
                    worker.gate.release()
            await asyncio.gather(*asked)
