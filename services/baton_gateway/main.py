"""Entry of the gateway: the public APIs and the registry in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from baton.v1 import inference_pb2_grpc, registry_pb2_grpc

from baton_actors import first_to_end, serve_until_signalled
from baton_config import Settings, resolve_model, served_name
from baton_gateway.affinity import PrefixMemory
from baton_gateway.cluster import Cluster
from baton_gateway.dispatch import Dispatcher
from baton_gateway.health import STALL_SECONDS, Health, HealthReporter
from baton_gateway.http_app import make_app
from baton_gateway.http_server import HttpServer
from baton_gateway.inference_service import InferenceServicer
from baton_gateway.registry_service import RegistryServicer
from baton_gateway.routing import RoutingRules
from baton_gateway.service import GatewayService
from baton_rpc import RpcServer, tls_files
from baton_telemetry import GatewayMetrics
from baton_tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

INFERENCE = "baton.v1.Inference"
REGISTRY = "baton.v1.Registry"
SHUTDOWN_GRACE_S = 5.0


class Gateway:
    """All parts of one gateway. `start` returns when every address answers; `stop` lets requests end for a while."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, stall_s: float = STALL_SECONDS) -> None:
        options, insecure = settings.gateway, settings.tls.allow_insecure
        tls = tls_files(settings.tls)
        self.metrics = GatewayMetrics()
        self.cluster = Cluster(options.lease_ttl_s, self.metrics, tls.channel_credentials() if tls else None)
        rules = RoutingRules(
            model=served_name(settings.model.name, settings.model.served_name),
            prefill_candidates=options.prefill_candidates,
            decode_computes_prompts=settings.decode.local_prefill != "never",
        )
        prefixes = PrefixMemory() if options.prefix_routing else None
        dispatcher = Dispatcher(self.cluster, rules, options.worker_wait_s, options.default_max_tokens, prefixes)
        self.service = GatewayService(rules.model, tokenizer, dispatcher, self.metrics, options.max_requests)
        self.health = health = Health(self.service, stall_s)
        self._registry = RpcServer([options.registry], tls=tls, allow_insecure=insecure)
        self._registry.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryServicer(self.cluster), REGISTRY)
        self._public = RpcServer([options.grpc], tls=tls, allow_insecure=insecure)
        inference = InferenceServicer(self.service, options.request_timeout_s)
        self._public.add(inference_pb2_grpc.add_InferenceServicer_to_server, inference, INFERENCE)
        app = make_app(self.service, health, options.request_timeout_s)
        self._http = HttpServer(app, options.http, tls=tls, allow_insecure=insecure)
        self._reporter = HealthReporter(health, self.cluster, self._public, INFERENCE)
        self._stack = contextlib.AsyncExitStack()

    @property
    def http_address(self) -> str:
        return self._http.address

    @property
    def grpc_address(self) -> str:
        return self._public.addresses[0]

    @property
    def registry_address(self) -> str:
        return self._registry.addresses[0]

    async def start(self) -> None:
        """Raises BindError; what had been started by then is stopped."""
        async with contextlib.AsyncExitStack() as stack:
            await self.cluster.start()
            stack.push_async_callback(self.cluster.stop)
            # Until the reporter has looked, nothing is promised.
            await self._public.set_serving(INFERENCE, False)
            await self._registry.start()
            stack.push_async_callback(self._registry.stop, 0)
            stack.push_async_callback(self._stop_public)
            await self._public.start()
            await self._reporter.start()
            stack.push_async_callback(self._reporter.stop)
            await self._http.start()
            self._stack = stack.pop_all()
        logger.info(
            "gateway ready: HTTP on %s, gRPC on %s, registry on %s",
            self.http_address,
            self.grpc_address,
            self.registry_address,
        )

    async def join(self) -> None:
        """Until a part ends that should not; raises what it failed of."""
        await first_to_end(self._http.join(), self.cluster.join(), self._reporter.join())

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _stop_public(self) -> None:
        await asyncio.gather(self._http.stop(SHUTDOWN_GRACE_S), self._public.stop(SHUTDOWN_GRACE_S))


async def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises ModelNotFoundError, TokenizerError, AddressError, InsecureAddressError, TlsError, BindError.
    """
    await serve_until_signalled(_serve(settings))


async def _serve(settings: Settings) -> None:
    tokenizer = await asyncio.to_thread(load_tokenizer, resolve_model(settings.model.name))
    gateway = Gateway(settings, tokenizer)
    await gateway.start()
    try:
        await gateway.join()
    finally:
        await gateway.stop()
