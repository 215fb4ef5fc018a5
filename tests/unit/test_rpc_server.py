import asyncio
import logging

import grpc
import pytest
import uvloop
from baton.v1 import inference_pb2, inference_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton_actors import DeadlineExceeded
from baton_rpc import BindError, InsecureAddressError, RemoteError, RpcServer, open_channel, outgoing_timeout, remaining

SERVICE = "baton.v1.Inference"


class NoSuchModel(Exception):
    status = "NOT_FOUND"
    reason = "NO_SUCH_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(f"no model {model!r}; there is 'right'")
        self.fields = {"model": model}


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.downstream: inference_pb2_grpc.InferenceStub | None = None
        self.ended = asyncio.Event()
        self.entered = asyncio.Event()

    async def Tokenize(self, request, context):
        match request.model:
            case "right":
                return inference_pb2.TokenizeResponse(token_ids=[1, 2, 3])
            case "broken":
                raise KeyError("a secret of the implementation")
            case "timeout":
                raise TimeoutError
            case "remote":
                return await self.downstream.Tokenize(inference_pb2.TokenizeRequest(model="wrong"))
            case "remaining":
                left = remaining(context)
                return inference_pb2.TokenizeResponse(max_model_len=0 if left is None else round(left * 1000))
            case "long":
                raise NoSuchModel("x" * 20_000)
        raise NoSuchModel(request.model)

    async def Generate(self, request, context):
        try:
            self.entered.set()
            yield inference_pb2.GenerateResponse(text="one")
            if request.model == "forever":
                await asyncio.Event().wait()
            raise NoSuchModel(request.model)
        finally:
            self.ended.set()


async def start(servicer, *addresses):
    server = RpcServer(addresses or ("127.0.0.1:0",))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, servicer, SERVICE)
    await server.start()
    return server


@pytest.fixture
async def served():
    servicer = Inference()
    server = await start(servicer)
    async with open_channel(server.addresses[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        servicer.downstream = stub
        yield servicer, server, channel, stub
    await server.stop(0)


def tokenize(stub, model, **options):
    return stub.Tokenize(inference_pb2.TokenizeRequest(model=model), **options)


async def failure(call) -> RemoteError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return RemoteError.from_rpc(caught.value)


async def test_a_typed_error_arrives_with_its_fields(served):
    error = await failure(tokenize(served[3], "wrong"))
    assert (error.status, error.reason, error.fields) == ("NOT_FOUND", "NO_SUCH_MODEL", {"model": "wrong"})
    assert error.message == "no model 'wrong'; there is 'right'"


async def test_a_callees_error_passes_through_unchanged(served):
    direct, relayed = await failure(tokenize(served[3], "wrong")), await failure(tokenize(served[3], "remote"))
    assert repr(relayed) == repr(direct)


async def test_an_unknown_exception_is_logged_and_opaque(served, caplog):
    with caplog.at_level(logging.ERROR, logger="baton_rpc"):
        error = await failure(tokenize(served[3], "broken"))
    assert error.status == "INTERNAL"
    assert "secret" not in error.message
    assert "a secret of the implementation" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_timeout_is_deadline_exceeded(served):
    assert (await failure(tokenize(served[3], "timeout"))).status == "DEADLINE_EXCEEDED"


async def test_an_overlong_error_still_arrives(served):
    error = await failure(tokenize(served[3], "long"))
    assert error.status == "NOT_FOUND"
    assert error.fields["model"].startswith("xxx")


async def test_an_error_after_the_first_message_of_a_stream(served):
    servicer, _, _, stub = served
    call = stub.Generate(inference_pb2.GenerateRequest(model="wrong"))
    assert (await call.read()).text == "one"
    assert (await failure(call.read())).reason == "NO_SUCH_MODEL"
    assert servicer.ended.is_set()


async def test_cancelling_a_stream_runs_the_handlers_clean_up(served):
    servicer, _, _, stub = served
    call = stub.Generate(inference_pb2.GenerateRequest(model="forever"))
    await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await servicer.ended.wait()


async def test_an_unimplemented_method(served):
    assert (await failure(served[3].Models(inference_pb2.ModelsRequest()))).status == "UNIMPLEMENTED"


async def test_deadlines_travel(served):
    stub = served[3]
    assert (await tokenize(stub, "remaining")).max_model_len == 0
    assert 1000 < (await tokenize(stub, "remaining", timeout=7)).max_model_len <= 7100


class Incoming:
    def __init__(self, left):
        self.left = left

    def time_remaining(self):
        return self.left


@pytest.mark.parametrize(
    ("left", "limit", "expected"), [(None, None, None), (None, 3, 3), (2, None, 2), (2, 3, 2), (4, 3, 3)]
)
def test_the_outgoing_timeout_is_the_smaller_one(left, limit, expected):
    assert outgoing_timeout(Incoming(left), limit) == expected


def test_no_outgoing_call_after_the_deadline():
    with pytest.raises(DeadlineExceeded):
        outgoing_timeout(Incoming(-0.1), 3)


async def test_health_follows_the_services(served):
    _, server, channel, _ = served
    health = health_pb2_grpc.HealthStub(channel)

    async def check(service):
        return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await check(SERVICE) == await check("") == serving
    await server.set_serving(SERVICE, False)
    assert await check(SERVICE) == await check("") == not_serving
    await server.set_serving(SERVICE, True)
    assert await check(SERVICE) == await check("") == serving
    with pytest.raises(KeyError):
        await server.set_serving("baton.v1.Other", True)


async def test_reflection_lists_the_services(served):
    stub = reflection_pb2_grpc.ServerReflectionStub(served[2])
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names >= {SERVICE, "grpc.health.v1.Health"}


async def test_a_unix_socket_is_private_and_removed(tmp_path):
    path = tmp_path / "socket"
    server = await start(Inference(), f"unix:{path}", "127.0.0.1:0")
    assert path.stat().st_mode & 0o777 == 0o600
    for address in server.addresses:
        async with open_channel(address) as channel:
            response = await tokenize(inference_pb2_grpc.InferenceStub(channel), "right")
            assert list(response.token_ids) == [1, 2, 3]
    await server.stop(0)
    assert not path.exists()


async def test_a_taken_port_is_an_error(served):
    with pytest.raises(BindError, match=r"127\.0\.0\.1"):
        await start(Inference(), served[1].addresses[0])


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50051", "example.org:80"])
def test_a_plain_address_beyond_loopback_is_refused(address):
    with pytest.raises(InsecureAddressError, match="allow_insecure"):
        RpcServer([address])


async def test_stopping_lets_running_calls_end_or_cancels_them():
    servicer = Inference()
    server = await start(servicer)
    async with open_channel(server.addresses[0]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(model="forever"))
        await call.read()
        async with asyncio.timeout(5):
            await server.stop(0.05)
            await servicer.ended.wait()
        assert (await failure(call.read())).status in {"CANCELLED", "UNAVAILABLE"}


async def test_a_restarted_peer_is_reached_again_within_a_second(tmp_path):
    address = f"unix:{tmp_path}/socket"
    server = await start(Inference(), address)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await tokenize(stub, "right", timeout=5)
        await server.stop(0)
        for _ in range(5):
            assert (await failure(tokenize(stub, "right", timeout=5))).status == "UNAVAILABLE"
        server = await start(Inference(), address)
        await tokenize(stub, "right", wait_for_ready=True, timeout=1)
    await server.stop(0)


def test_it_works_under_uvloop():
    async def main():
        server = await start(Inference())
        async with open_channel(server.addresses[0]) as channel:
            error = await failure(tokenize(inference_pb2_grpc.InferenceStub(channel), "wrong"))
        await server.stop(0)
        return error.reason

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "NO_SUCH_MODEL"
