"""Entry of the prefill worker."""

from __future__ import annotations

from baton.v1 import prefill_pb2_grpc, registry_pb2

from baton_actors import serve_until_signalled
from baton_config.settings import Settings
from baton_prefill.sender import KvSender
from baton_prefill.servicer import PrefillServicer
from baton_telemetry.metrics import PrefillMetrics
from baton_worker.background import BackgroundTasks
from baton_worker.worker import Worker


async def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM."""
    await serve_until_signalled(_serve(settings))


async def _serve(settings: Settings) -> None:
    section = settings.prefill
    sender = KvSender(BackgroundTasks())
    metrics = PrefillMetrics()
    worker = Worker(settings, section, registry_pb2.WORKER_ROLE_PREFILL, metrics, sender, with_agent=True)
    worker.add(
        prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillServicer(worker, metrics, sender), "baton.v1.Prefill"
    )
    await worker.run()
