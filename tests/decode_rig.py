"""A decode worker whose model process, agent and prefill worker are a test's, and the calls that it is asked."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, registry_pb2

from baton_decode.receiver import KvReceiver
from baton_decode.servicer import DecodeServicer
from baton_telemetry.metrics import DecodeMetrics
from baton_worker.engine_actor import NoHooks
from fake_prefill import FakePrefill
from worker_rig import Rig, worker_rig


@contextlib.asynccontextmanager
async def decode_rig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str = "never", **section: Any
) -> AsyncIterator[Rig]:
    """Pages of 4 tokens, 16 of them, chunks of 8; every step ends by itself. `policy`: of local prefill; `section`:
    further settings of the worker."""
    metrics = DecodeMetrics()

    def add(worker):
        receiver = KvReceiver(worker, worker.section, metrics)
        servicer = DecodeServicer(worker, worker.section, metrics, receiver)
        worker.add(decode_pb2_grpc.add_DecodeServicer_to_server, servicer, "baton.v1.Decode")

    colocated = policy == "always"
    async with worker_rig(
        monkeypatch,
        tmp_path,
        registry_pb2.WORKER_ROLE_COLOCATED if colocated else registry_pb2.WORKER_ROLE_DECODE,
        metrics,
        NoHooks(),
        add,
        section={"local_prefill": policy, "worker_id": "d0", **section},
        with_agent=not colocated,
        automatic=True,
        max_model_len=128,
    ) as rig:
        rig.metrics = metrics
        rig.stub = decode_pb2_grpc.DecodeStub(rig.channel)
        rig.prefill = None if colocated else await FakePrefill("p0", rig.agent).start()
        yield rig
        if rig.prefill is not None:
            await rig.prefill.stop()


def generate_request(
    rig: Rig, tokens: int = 10, max_tokens: int = 3, workers: Any = None, **sampling: Any
) -> decode_pb2.DecodeGenerateRequest:
    if workers is None:
        workers = [rig.prefill.info(rig.layout)] if rig.prefill is not None else []
    return decode_pb2.DecodeGenerateRequest(
        request_id="r",
        prompt_token_ids=[t % 90 for t in range(tokens)],
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        prefill_workers=workers,
    )
