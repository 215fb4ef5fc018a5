"""Waiting for services to be ready."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_config import Settings
from baton_rpc import TlsFiles, open_channel, tls_files

_PAUSE_SECONDS = 0.1


def credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    files: TlsFiles | None = tls_files(settings.tls)
    return None if files is None else files.channel_credentials()


async def wait_until_serving(address: str, settings: Settings) -> None:
    """Returns as soon as the server at ``address`` reports itself as SERVING. Waits for ever."""
    request = health_pb2.HealthCheckRequest(service="")
    async with open_channel(address, credentials(settings)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in health.Watch(request):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:  # not listening yet
                pass
            await asyncio.sleep(_PAUSE_SECONDS)
