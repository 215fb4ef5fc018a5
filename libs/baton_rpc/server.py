"""A gRPC server with health, reflection, typed errors and a graceful stop."""

import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton_rpc import errors
from baton_rpc.addresses import TcpAddress, UnixAddress, parse_address
from baton_rpc.channel import MESSAGE_LIMIT
from baton_rpc.tls import TlsFiles, require_protection

logger = logging.getLogger(__name__)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    # By default two servers may share a port, and each would get some of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
)

Context = grpc.aio.ServicerContext
if TYPE_CHECKING:  # generic in the stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]


class BindError(Exception):
    """An address can't be listened on."""

    status = "UNAVAILABLE"
    reason = "BIND_FAILED"

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"can't listen on {address}: {problem}")
        self.fields = {"address": address}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Translates what handlers raise, for unary and streaming methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method: grpc answers UNIMPLEMENTED
            return handler
        factories: dict[tuple[bool, bool], tuple[Callable[..., Handler], Any]] = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        factory, behaviour = factories[handler.request_streaming, handler.response_streaming]
        return factory(
            _translating(behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _translating(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: "Context[Any, Any]") -> AsyncIterator[Any]:
            responses = behaviour(request, context)
            try:
                async for response in responses:
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await errors.abort(context, error)
            finally:
                # Runs the handler's own clean-up now, not when the garbage collector comes by.
                await responses.aclose()

        return generate

    if not inspect.iscoroutinefunction(behaviour):
        return behaviour  # reflection is served by plain functions on grpc's thread pool

    async def call(request: Any, context: "Context[Any, Any]") -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await errors.abort(context, error)

    return call


class RpcServer:
    """Serves services on TCP and unix addresses.

    ``add`` services, then ``start``; a service answers its health check with SERVING from ``start`` on, unless
    ``set_serving`` said otherwise. The health of the whole server (service "") is SERVING while all services are.
    """

    def __init__(self, addresses: Sequence[str], *, tls: TlsFiles | None = None, allow_insecure: bool = False) -> None:
        """Raises AddressError, InsecureAddressError and TlsError."""
        if not addresses:
            raise ValueError("a server needs at least one address")
        for address in addresses:
            require_protection(address, encrypted=tls is not None, allow_insecure=allow_insecure)
        self._wanted = [parse_address(address) for address in addresses]
        self._credentials = tls.server_credentials() if tls is not None else None
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._serving: dict[str, bool] = {}
        self._bound: list[str] = []
        self._started = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service: str) -> None:
        """``register`` is the generated add_…Servicer_to_server, ``service`` the full name, as in "baton.v1.Decode"."""
        register(servicer, self._server)
        self._serving.setdefault(service, True)

    @property
    def addresses(self) -> list[str]:
        """Where the server listens, with the ports that the system chose; in the order of the constructor."""
        return list(self._bound)

    async def start(self) -> None:
        """Raises BindError."""
        names = (*self._serving, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        for address in self._wanted:
            self._bound.append(self._bind(address))
        await self._server.start()
        self._started = True
        for service, serving in self._serving.items():
            await self._report(service, serving)

    async def set_serving(self, service: str, serving: bool) -> None:
        """May be called before ``start`` too. Raises KeyError for a service that was not added."""
        if service not in self._serving:
            raise KeyError(f"service {service!r} was not added; there are {sorted(self._serving)}")
        self._serving[service] = serving
        if self._started:
            await self._report(service, serving)

    async def stop(self, grace: float = 5.0) -> None:
        """Refuses new calls at once and cancels those that still run after ``grace`` seconds. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        for address in self._wanted:
            if isinstance(address, UnixAddress):
                _unlink(address.path)

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()

    def _bind(self, address: TcpAddress | UnixAddress) -> str:
        try:
            if isinstance(address, UnixAddress):
                self._server.add_insecure_port(str(address))
                os.chmod(address.path, 0o600)
                return str(address)
            if self._credentials is None:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), self._credentials)
        except (RuntimeError, OSError) as error:
            raise BindError(str(address), "is it taken, or not an address of this machine?") from error
        return str(TcpAddress(address.host, port))

    async def _report(self, service: str, serving: bool) -> None:
        await self._health.set(service, _health_status(serving))
        await self._health.set("", _health_status(all(self._serving.values())))


def _health_status(serving: bool) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
    status = health_pb2.HealthCheckResponse
    return status.SERVING if serving else status.NOT_SERVING


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
