"""A registry that keeps every lease until it is told otherwise."""

from baton.v1 import registry_pb2, registry_pb2_grpc

from baton_rpc import RpcServer
from fake_agent import Refusal


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    def __init__(self, target):
        self.target = target
        self.ttl_ms = 300
        self.leases = {}
        self.registered = []
        self.renewals = []
        self.down = None
        self.gate = None
        self._lease = 0
        self._server = None

    async def start(self):
        self._server = RpcServer([self.target])
        self._server.add(registry_pb2_grpc.add_RegistryServicer_to_server, self, "baton.v1.Registry")
        await self._server.start()
        return self

    async def stop(self):
        await self._server.stop(0)

    @property
    def workers(self):
        return [worker.address for worker in self.leases.values()]

    async def Register(self, request, context):
        if self.gate:
            await self.gate(request, context)
        if self.down:
            raise Refusal(self.down, "TEST")
        self._lease += 1
        self.leases[self._lease] = request.worker
        self.registered.append(request.worker)
        return registry_pb2.RegisterResponse(lease=self._lease, ttl_ms=self.ttl_ms)

    async def Renew(self, request, context):
        if self.down:
            raise Refusal(self.down, "TEST")
        if request.lease not in self.leases:
            raise Refusal("NOT_FOUND", "UNKNOWN_LEASE")
        self.renewals.append(request.load)
        return registry_pb2.RenewResponse()

    async def Deregister(self, request, context):
        self.leases.pop(request.lease, None)
        return registry_pb2.DeregisterResponse()
