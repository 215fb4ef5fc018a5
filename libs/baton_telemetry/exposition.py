"""`/metrics` and `/healthz` for services that have no HTTP server of their own.

It runs in the service's own event loop and not in prometheus_client's server thread, for two reasons: a loop that is
stuck must not look healthy, and gauges read state that belongs to the loop. It answers GET and HEAD, one request a
connection, which is all that a scraper or a probe needs; whatever is richer belongs behind a real HTTP server.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

logger = logging.getLogger(__name__)

_HEAD_LIMIT = 16 << 10
_REQUEST_SECONDS = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Health = Callable[[], Mapping[str, object] | None]


class MetricsServer:
    """``health`` returns None while the service is healthy, else what is wrong, told as JSON with status 503."""

    def __init__(self, registry: CollectorRegistry, health: Health = lambda: None) -> None:
        self._registry = registry
        self._health = health
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """host:port with the port that the system chose; empty before ``start`` or without an address."""
        if self._server is None or not self._server.sockets:
            return ""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self, address: str) -> None:
        """Listens on host:port; does nothing for an empty address. Raises OSError."""
        if not address:
            return
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=_HEAD_LIMIT)

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._connections):
            writer.close()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            logger.debug("a scraper's connection ended without a request")
        finally:
            self._connections.discard(writer)
            writer.close()

    def _respond(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        words = request.split(" ")
        if len(words) != 3:
            return _response(400, "text/plain", b"bad request\n")
        method, path = words[0], words[1].partition("?")[0]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if method not in {"GET", "HEAD"}:
            return _response(405, "text/plain", b"GET or HEAD\n")
        if path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", ""))
            response = _response(200, content_type, encode(self._registry))
        elif path == "/healthz":
            problem = self._health()
            body = json.dumps({"status": "ok"} if problem is None else {"status": "unhealthy", **problem}) + "\n"
            response = _response(200 if problem is None else 503, "application/json", body.encode())
        else:
            response = _response(404, "text/plain", b"there are /metrics and /healthz\n")
        return response if method == "GET" else response[: response.index(b"\r\n\r\n") + 4]


def _response(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
