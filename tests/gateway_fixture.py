"""A gateway in the test's own event loop, with fake workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

import grpc
import openai
from baton.v1 import inference_pb2_grpc

from baton_config import Settings, load_settings
from baton_gateway.main import Gateway
from baton_rpc import open_channel
from baton_tokenizer import Tokenizer, load_tokenizer
from fake_decode import FakeDecode, register, worker_info
from tokenizer_samples import default_model

TEXT = "The café is open — 24 hours 👍🏽 日本!"


@lru_cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(default_model())


def settings(**options: object) -> Settings:
    """Free ports, and a lease that outlives a test."""
    gateway = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "registry": "127.0.0.1:0", "lease_ttl_s": 60.0}
    return load_settings(
        {"model": {"served_name": "test-model"}, "gateway": gateway | {"worker_wait_s": 0.0} | options}
    )


class Stack:
    """A running gateway and the clients of it."""

    def __init__(self, gateway: Gateway, channel: grpc.aio.Channel) -> None:
        self.gateway = gateway
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.base_url = f"http://{gateway.http_address}"
        self.workers: list[FakeDecode] = []

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=30)

    async def add(self, worker: FakeDecode, **info: Any) -> int:
        """Starts and registers a fake worker; returns its lease."""
        await worker.start()
        self.workers.append(worker)
        info.setdefault("incarnation", worker.incarnation)
        return await register(self.gateway.registry_address, worker_info(worker.worker_id, worker.address, **info))


@contextlib.asynccontextmanager
async def gateway(stall_s: float = 120.0, **options: object) -> AsyncIterator[Stack]:
    """`options` are those of the [gateway] section."""
    running = Gateway(settings(**options), tokenizer(), stall_s)
    await running.start()
    channel = open_channel(running.grpc_address)
    stack = Stack(running, channel)
    try:
        yield stack
    finally:
        await channel.close()
        for worker in stack.workers:
            await worker.stop()
        await running.stop()


def says(text: str = TEXT, eos: bool = True, **options: Any) -> FakeDecode:
    """A worker that answers with this text."""
    ids = tokenizer().encode(text)
    return FakeDecode([*ids, *tokenizer().eos_token_ids] if eos else ids, **options)
