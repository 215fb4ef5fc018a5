"""Waiting until the gateway knows all workers."""

import asyncio

import grpc
from baton.v1 import registry_pb2, registry_pb2_grpc

from baton_cli.plan import ClusterPlan
from baton_cli.probe import credentials
from baton_rpc import RemoteError, open_channel

_PAUSE_SECONDS = 0.05


class WorkersMissingError(Exception):
    """Workers run but are not in the registry."""

    status = "UNAVAILABLE"
    reason = "WORKERS_MISSING"

    def __init__(self, missing: set[str], seconds: float, cause: str) -> None:
        names = ", ".join(sorted(missing))
        super().__init__(f"{names} did not register within {seconds:g} s" + (f": {cause}" if cause else ""))
        self.fields = {"workers": names}


async def wait_until_registered(plan: ClusterPlan) -> None:
    """Raises WorkersMissingError after cluster.start_timeout_s."""
    settings = plan.gateway.settings
    wanted = {worker.worker.name for worker in plan.workers}
    missing, cause = wanted, ""
    try:
        async with asyncio.timeout(settings.cluster.start_timeout_s):
            async with open_channel(settings.registry_target, credentials(settings)) as channel:
                registry = registry_pb2_grpc.RegistryStub(channel)
                while missing:
                    try:
                        response = await registry.List(registry_pb2.ListRequest(), timeout=2.0)
                        missing, cause = wanted - {worker.worker_id for worker in response.workers}, ""
                    except grpc.aio.AioRpcError as error:
                        cause = str(RemoteError.from_rpc(error))
                    await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        raise WorkersMissingError(missing, settings.cluster.start_timeout_s, cause) from None
