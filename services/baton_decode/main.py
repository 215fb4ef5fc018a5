"""Entry of the decode worker; with local_prefill = "always" it is the colocated worker."""

from __future__ import annotations

from baton.v1 import decode_pb2_grpc, registry_pb2

from baton_actors import serve_until_signalled
from baton_config.settings import Settings
from baton_decode.receiver import KvReceiver
from baton_decode.servicer import DecodeServicer
from baton_telemetry.metrics import DecodeMetrics
from baton_worker.engine_actor import NoHooks
from baton_worker.worker import Worker


async def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM."""
    await serve_until_signalled(_serve(settings))


async def _serve(settings: Settings) -> None:
    section = settings.decode
    colocated = section.local_prefill == "always"
    role = registry_pb2.WORKER_ROLE_COLOCATED if colocated else registry_pb2.WORKER_ROLE_DECODE
    metrics = DecodeMetrics()
    worker = Worker(
        settings, section, role, metrics, NoHooks(), with_agent=not colocated, data_parallel=section.data_parallel
    )
    receiver = KvReceiver(worker, section, metrics)
    worker.add(
        decode_pb2_grpc.add_DecodeServicer_to_server,
        DecodeServicer(worker, section, metrics, receiver),
        "baton.v1.Decode",
    )
    await worker.run()
