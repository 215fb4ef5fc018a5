"""Mutual TLS from files, and the rule that nothing listens beyond loopback without it."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from baton_config import TlsSettings
from baton_rpc.addresses import TcpAddress, parse_address


class TlsError(Exception):
    """Certificate files are missing or unreadable."""

    status = "FAILED_PRECONDITION"
    reason = "TLS_FILES"

    def __init__(self, problem: str, **fields: str) -> None:
        super().__init__(problem)
        self.fields = fields


class InsecureAddressError(Exception):
    """A TCP address other than loopback was to be served without TLS."""

    status = "FAILED_PRECONDITION"
    reason = "INSECURE_ADDRESS"

    def __init__(self, address: str) -> None:
        super().__init__(
            f"refusing to listen on {address} without TLS: only loopback and unix sockets may be plain; "
            "set tls.certificate, tls.key and tls.authority, or tls.allow_insecure = true on a trusted network"
        )
        self.fields = {"address": address}


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: this process's certificate chain and key, and the authority that signs its peers' certificates."""

    certificate: Path
    key: Path
    authority: Path

    def server_credentials(self) -> grpc.ServerCredentials:
        """Clients without a certificate of the authority are refused."""
        certificate, key, authority = self._read()
        return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        certificate, key, authority = self._read()
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        contents = []
        for role, path in (("certificate", self.certificate), ("key", self.key), ("authority", self.authority)):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise TlsError(f"can't read tls.{role} {path}: {error.strerror}", role=role, path=str(path)) from error
        return contents[0], contents[1], contents[2]


def require_protection(address: str, *, encrypted: bool, allow_insecure: bool) -> None:
    """Raises InsecureAddressError for a plain TCP address beyond loopback that wasn't allowed explicitly."""
    parsed = parse_address(address)
    if isinstance(parsed, TcpAddress) and not parsed.loopback and not encrypted and not allow_insecure:
        raise InsecureAddressError(address)


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """The files that the configuration names; None if it names none."""
    if settings.certificate is None or settings.key is None or settings.authority is None:
        return None
    return TlsFiles(settings.certificate, settings.key, settings.authority)
