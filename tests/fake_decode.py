"""A decode worker without a model: it says a given text, at a given pace, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, registry_pb2, registry_pb2_grpc

from baton_rpc import RpcServer, open_channel


class FakeFailure(Exception):
    """What a worker may answer."""

    def __init__(self, status: str, reason: str, message: str = "made up") -> None:
        super().__init__(message)
        self.status, self.reason, self.fields = status, reason, {}


@dataclass
class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """token_ids: what it says, cut to max_tokens, over and over with ignore_eos.

    gate: one permit lets one message out; without it there is no pace. per_message: tokens in a message.
    failure: raised after `fail_after` messages. silent_end: the stream ends without a finish reason.
    """

    token_ids: Sequence[int]
    worker_id: str = "decode-0"
    gate: asyncio.Semaphore | None = None
    per_message: int = 1
    failure: FakeFailure | None = None
    fail_after: int = 0
    silent_end: bool = False
    cached_tokens: int = 0
    incarnation: int = 1
    requests: list[decode_pb2.DecodeGenerateRequest] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    running: int = 0
    server: RpcServer | None = None

    async def start(self) -> None:
        self.changed = asyncio.Condition()
        self.server = RpcServer(["127.0.0.1:0"])
        self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self, "baton.v1.Decode")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    @property
    def address(self) -> str:
        assert self.server is not None
        return self.server.addresses[0]

    async def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Waits for something to become true of this worker."""
        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(condition)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def Generate(
        self, request: decode_pb2.DecodeGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.running += 1
        await self._note()
        done = False
        try:
            async for response in self._answer(request):
                yield response
            done = True
            self.finished.append(request.request_id)
        except FakeFailure:
            done = True
            raise
        finally:
            self.running -= 1
            if not done:
                self.cancelled.append(request.request_id)
            # The handler is being cancelled; telling the test must not be.
            await asyncio.shield(asyncio.ensure_future(self._note()))

    async def _answer(
        self, request: decode_pb2.DecodeGenerateRequest
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        sampling = request.sampling
        said = list(self.token_ids)
        ended = len(said) <= sampling.max_tokens and not sampling.ignore_eos
        while sampling.ignore_eos and len(said) < sampling.max_tokens:
            said += self.token_ids
        said = said[: sampling.max_tokens]
        sent = 0
        for messages, start in enumerate(range(0, len(said), self.per_message)):
            if self.failure is not None and messages == self.fail_after:
                raise self.failure
            if self.gate is not None:
                await self.gate.acquire()
            ids = said[start : start + self.per_message]
            sent += len(ids)
            yield decode_pb2.DecodeGenerateResponse(
                token_ids=ids, logprobs=[_logprobs(i, sampling.logprobs) for i in ids if sampling.HasField("logprobs")]
            )
        if self.failure is not None:
            raise self.failure
        if self.silent_end:
            return
        yield decode_pb2.DecodeGenerateResponse(
            finish_reason=common_pb2.FINISH_REASON_STOP if ended else common_pb2.FINISH_REASON_LENGTH,
            usage=common_pb2.Usage(
                prompt_tokens=len(request.prompt_token_ids), completion_tokens=sent, cached_tokens=self.cached_tokens
            ),
            timeline=common_pb2.Timeline(decode_worker=self.worker_id, reserve_us=7, inter_token_us=1 << 40),
        )


def _logprobs(token_id: int, top: int) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5),
        top=[common_pb2.TokenLogprob(token_id=token_id + i, logprob=-0.5 - i) for i in range(top)],
    )


def worker_info(
    worker_id: str,
    address: str = "127.0.0.1:1",
    role: registry_pb2.WorkerRole.ValueType = registry_pb2.WORKER_ROLE_COLOCATED,
    *,
    model: str = "test-model",
    fingerprint: str = "f1",
    max_model_len: int = 512,
    incarnation: int = 1,
    load: registry_pb2.WorkerLoad | None = None,
) -> registry_pb2.WorkerInfo:
    """A valid announcement."""
    return registry_pb2.WorkerInfo(
        worker_id=worker_id,
        role=role,
        incarnation=incarnation,
        address=address,
        model=registry_pb2.ModelInfo(
            name=model, fingerprint=fingerprint, max_model_len=max_model_len, vocab_size=49_152
        ),
        layout=common_pb2.KvLayout(page_size=16),
        agent=None
        if role == registry_pb2.WORKER_ROLE_COLOCATED
        else common_pb2.AgentDescriptor(version=1, incarnation=9, control_address="127.0.0.1:2", transport="tcp"),
        load=load,
    )


async def register(registry: str, worker: registry_pb2.WorkerInfo) -> int:
    """Announces a worker at the registry; returns the lease."""
    async with open_channel(registry) as channel:
        response = await registry_pb2_grpc.RegistryStub(channel).Register(registry_pb2.RegisterRequest(worker=worker))
        return response.lease


async def deregister(registry: str, lease: int) -> None:
    async with open_channel(registry) as channel:
        await registry_pb2_grpc.RegistryStub(channel).Deregister(registry_pb2.DeregisterRequest(lease=lease))
