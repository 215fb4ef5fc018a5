"""Ports of this machine."""

import socket

from baton_rpc import TcpAddress, parse_address


class AddressTakenError(Exception):
    """Somebody else listens there."""

    status = "UNAVAILABLE"
    reason = "ADDRESS_TAKEN"

    def __init__(self, address: str, option: str) -> None:
        super().__init__(f"{address} is taken by another process or not this machine's; choose another with {option}")
        self.fields = {"address": address, "option": option}


def is_free(address: str) -> bool:
    """Whether a server could listen on this TCP address now."""
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        return True
    family = socket.AF_INET6 if ":" in parsed.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parsed.host, parsed.port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Different TCP ports of loopback that nobody uses now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
