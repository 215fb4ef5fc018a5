"""A prefill worker whose model process and agent are a test's, and the calls that it is asked."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from baton.v1 import agent_pb2, common_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2

from baton_prefill.sender import KvSender
from baton_prefill.servicer import PrefillServicer
from baton_telemetry.metrics import PrefillMetrics
from baton_worker.background import BackgroundTasks
from worker_rig import Rig, worker_rig


@contextlib.asynccontextmanager
async def prefill_rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **section: Any) -> AsyncIterator[Rig]:
    """Pages of 4 tokens, 16 of them, chunks of 8. `section`: settings of the worker."""
    metrics, sender = PrefillMetrics(), KvSender(BackgroundTasks())

    def add(worker):
        servicer = PrefillServicer(worker, metrics, sender)
        worker.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer, "baton.v1.Prefill")

    async with worker_rig(
        monkeypatch,
        tmp_path,
        registry_pb2.WORKER_ROLE_PREFILL,
        metrics,
        sender,
        add,
        section=section,
        max_model_len=128,
    ) as rig:
        rig.sender, rig.metrics = sender, metrics
        rig.stub = prefill_pb2_grpc.PrefillStub(rig.channel)
        yield rig


def run_request(
    rig: Rig, tokens: int = 10, prefix: int = 0, pages: Sequence[int] | None = None, **changes: Any
) -> prefill_pb2.RunRequest:
    wanted = max(0, -(-(tokens - 1) // 4) - prefix // 4)
    inbox = agent_pb2.InboxDescriptor(
        version=1, slot=5, generation=3, layout=rig.layout, sharding=common_pb2.Sharding(tensor_parallel=1)
    )
    inbox.layout.pages = 999  # the caller's pool has another size
    message = prefill_pb2.RunRequest(
        request_id="r",
        prompt_token_ids=[t % 90 for t in range(tokens)],
        inbox=inbox,
        pages=range(50, 50 + wanted) if pages is None else pages,
        prefix_tokens=prefix,
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message
