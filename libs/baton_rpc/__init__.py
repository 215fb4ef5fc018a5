"""gRPC as every Baton service uses it: servers, channels, TLS, deadlines and typed errors."""

from baton_rpc.addresses import AddressError, TcpAddress, UnixAddress, advertised_address, parse_address
from baton_rpc.channel import open_channel
from baton_rpc.deadline import incoming_deadline, outgoing_timeout, remaining
from baton_rpc.errors import RemoteError, TypedError, describe
from baton_rpc.server import BindError, RpcServer
from baton_rpc.tls import InsecureAddressError, TlsError, TlsFiles, tls_files

__all__ = [
    "AddressError",
    "BindError",
    "InsecureAddressError",
    "RemoteError",
    "RpcServer",
    "TcpAddress",
    "TlsError",
    "TlsFiles",
    "TypedError",
    "UnixAddress",
    "advertised_address",
    "describe",
    "incoming_deadline",
    "open_channel",
    "outgoing_timeout",
    "parse_address",
    "remaining",
    "tls_files",
]
