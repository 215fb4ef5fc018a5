"""uvicorn inside the gateway's own event loop, under the gateway's own control."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from baton_rpc import BindError, TcpAddress, TlsFiles, UnixAddress, parse_address
from baton_rpc.tls import require_protection

BACKLOG = 2048
# How long requests that were cancelled at the end may take to tell their clients so.
CANCEL_SECONDS = 1.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair: one of them ends all its servers in order."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class HttpServer:
    """Serves an application on `host:port` or `unix:path`.

    With TLS a TCP address beyond loopback is served as HTTPS, and clients need a certificate of the authority.
    Raises AddressError, InsecureAddressError, and from `start` BindError.
    """

    def __init__(
        self, app: ASGIApp, address: str, *, tls: TlsFiles | None = None, allow_insecure: bool = False
    ) -> None:
        require_protection(address, encrypted=tls is not None, allow_insecure=allow_insecure)
        self._wanted = parse_address(address)
        beyond_loopback = isinstance(self._wanted, TcpAddress) and not self._wanted.loopback
        files = tls if beyond_loopback else None
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            ssl_certfile=files.certificate if files else None,
            ssl_keyfile=files.key if files else None,
            ssl_ca_certs=str(files.authority) if files else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if files else ssl.CERT_NONE,
        )
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._bound = ""

    @property
    def address(self) -> str:
        """With the port that the system chose; empty before `start`."""
        return self._bound

    async def start(self) -> None:
        listener = self._bind()
        self._server = _Server(self._config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http server")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def join(self) -> None:
        """Until the server ends; raises what it failed of."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self, grace: float = 5.0) -> None:
        """Takes no new connections and cancels requests that still run after `grace` seconds. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await asyncio.wait([self._task])
        # uvicorn cancels what is left and does not look back.
        if cancelled := set(self._server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=CANCEL_SECONDS)
        if isinstance(self._wanted, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._wanted.path)

    def _bind(self) -> socket.socket:
        wanted = self._wanted
        try:
            if isinstance(wanted, UnixAddress):
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(wanted.path)
                os.chmod(wanted.path, 0o600)
                self._bound = str(wanted)
            else:
                family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
                # asyncio turns Nagle's algorithm off only where the protocol is named: 1.7 ms a request, else 46.
                listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((wanted.host, wanted.port))
                self._bound = str(TcpAddress(wanted.host, listener.getsockname()[1]))
        except OSError as error:
            raise BindError(str(wanted), error.strerror or "is it taken?") from error
        return listener
