"""gRPC face of the embedded registry."""

from __future__ import annotations

from typing import Any

import grpc
from baton.v1 import registry_pb2, registry_pb2_grpc

from baton_gateway.cluster import Cluster

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterResponse:
        lease, ttl_ms = self._cluster.register(request.worker)
        return registry_pb2.RegisterResponse(lease=lease, ttl_ms=ttl_ms)

    async def Renew(self, request: registry_pb2.RenewRequest, context: Context) -> registry_pb2.RenewResponse:
        self._cluster.renew(request.lease, request.load)
        return registry_pb2.RenewResponse()

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterResponse:
        self._cluster.deregister(request.lease)
        return registry_pb2.DeregisterResponse()

    async def List(self, request: registry_pb2.ListRequest, context: Context) -> registry_pb2.ListResponse:
        return registry_pb2.ListResponse(workers=self._cluster.workers())
