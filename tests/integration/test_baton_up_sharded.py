"""`baton up` with model processes that share engines, and engines that share a worker: the tokens of one process."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc

from baton_engine.messages import EngineSpec
from baton_up import Up, up
from engine_driver import Driver
from engine_threads import ThreadEngine
from small_deepseek import SmallDeepseek
from small_models import TOKENIZER_MINIMUM, SmallCheckpoint, SmallModel

NEW_TOKENS = 10
VOCABULARY = TOKENIZER_MINIMUM + 4
# Inside a page, one token into another, and over several chunks of 24.
LENGTHS = (9, 33, 70, 71)

pytestmark = pytest.mark.timeout(300)

CASES: dict[str, tuple[SmallCheckpoint, tuple[str, ...], tuple[int, int]]] = {
    "6 heads, 2 into 1": (
        SmallModel(heads=6, kv_heads=6, vocabulary=VOCABULARY),
        ("--prefill-tp", "2", "--decode-tp", "1"),
        (1, 1),
    ),
    "3 heads, 1 into 2": (
        SmallModel(heads=6, kv_heads=3, vocabulary=VOCABULARY, family="qwen3"),
        ("--prefill-tp", "1", "--decode-tp", "2"),
        (2, 1),
    ),
    "6 heads, 2 into 3": (
        SmallModel(heads=12, kv_heads=6, vocabulary=VOCABULARY),
        ("--prefill-tp", "2", "--decode-tp", "3"),
        (3, 1),
    ),
    "latent, 2 into 1": (
        SmallDeepseek(vocabulary=VOCABULARY),
        ("--prefill-tp", "2", "--decode-tp", "1"),
        (1, 1),
    ),
    "latent, 1 into 2": (
        SmallDeepseek(vocabulary=VOCABULARY, generation=2, query_rank=None, shared=2),
        ("--prefill-tp", "1", "--decode-tp", "2"),
        (2, 1),
    ),
    "latent, 2 into 2 engines": (
        SmallDeepseek(vocabulary=VOCABULARY),
        ("--prefill-tp", "2", "--decode-dp", "2"),
        (1, 2),
    ),
}


@dataclass(frozen=True)
class Expected:
    prompts: list[list[int]]
    tokens: list[list[int]]


async def expected(path: Path) -> Expected:
    """What an engine of one rank says that computes everything itself."""
    engine = ThreadEngine(EngineSpec(model_path=str(path), pages=64))
    driver = Driver(engine)  # type: ignore[arg-type]
    rng = random.Random(7)
    prompts = [[rng.randrange(4, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    found = await driver.run([driver.sequence(prompt, NEW_TOKENS) for prompt in prompts])
    engine.close()
    return Expected(prompts, [output.tokens for output in found])


async def answer(running: Up, prompt: list[int]) -> list[int]:
    sampling = common_pb2.SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    request = inference_pb2.GenerateRequest(sampling=sampling)
    request.token_ids.ids.extend(prompt)
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
            tokens += message.token_ids
    return tokens


@pytest.mark.parametrize("case", CASES)
async def test_the_tokens_are_those_of_one_process(case: str, tmp_path: Path) -> None:
    model, options, shape = CASES[case]
    path = model.write_hugging_face(tmp_path / "small", tokenizer=True)
    wanted = await expected(path)
    chunks = ("--set", "prefill.chunk_tokens=24", "--set", "decode.checksum=crc32c")
    async with up(path, tmp_path, *options, *chunks) as running:
        assert [await answer(running, prompt) for prompt in wanted.prompts] == wanted.tokens
        # All at once, twice: with the prefixes of the first round, and on every engine.
        together = await asyncio.gather(*(answer(running, prompt) for prompt in wanted.prompts * 2))
        assert together == wanted.tokens * 2
        async with grpc.aio.insecure_channel(running.registry) as channel:
            listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
        (decode,) = (worker for worker in listed.workers if worker.role == registry_pb2.WORKER_ROLE_DECODE)
        assert (decode.sharding.tensor_parallel, decode.sharding.data_parallel) == shape
        assert decode.load.total_pages == shape[1] * decode.layout.pages
