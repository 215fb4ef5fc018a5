"""Addresses of services: ``host:port``, ``[v6]:port`` or ``unix:path``."""

import ipaddress
from dataclasses import dataclass

# sockaddr_un.sun_path holds 108 bytes with the closing zero.
UNIX_PATH_LIMIT = 107


class AddressError(Exception):
    """An address can't be used."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_ADDRESS"

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"address {address!r}: {problem}")
        self.fields = {"address": address}


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: what it resolves to may change, so it isn't trusted


@dataclass(frozen=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Raises AddressError, saying what would be right."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
        if not path:
            raise AddressError(text, "no path; write unix:/run/baton/agent.sock")
        if len(path.encode()) > UNIX_PATH_LIMIT:
            raise AddressError(text, f"a unix socket's path has at most {UNIX_PATH_LIMIT} bytes")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(text, "write host:port with a port from 0 to 65535, or unix:path")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(text, "write an IPv6 address in brackets, as in [::1]:50051")
    return TcpAddress(host, int(port))


def advertised_address(bound: str, host: str | None) -> str:
    """What to tell others: ``bound`` with ``host`` in place of its own, if given.

    Raises AddressError for a wildcard address without one: nobody could call it.
    """
    address = parse_address(bound)
    if isinstance(address, UnixAddress):
        return bound
    if host is not None:
        return str(TcpAddress(host, address.port))
    if address.host in {"0.0.0.0", "::"}:
        raise AddressError(bound, "others can't call a wildcard address; set advertise_host")
    return bound
