"""Which GID, RoCE version and traffic class the connections of an RDMA device have.

libfabric's verbs provider makes its connections through the kernel's rdma_cm and has no option for these. There the
local address decides on device, port and GID; version and traffic class are defaults of the device, in configfs.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from .errors import AgentError

DEVICES = Path("/sys/class/infiniband")
DEFAULTS = Path("/sys/kernel/config/rdma_cm")
VERSIONS = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}


class RoceNotConfigurable(AgentError):
    """The node has no GID on the device, or the kernel does not take an option for it."""

    status = "FAILED_PRECONDITION"
    reason = "ROCE_NOT_CONFIGURABLE"


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table; `kind` as the kernel calls it, such as "RoCE v2"."""

    device: str
    port: int
    index: int
    address: ipaddress.IPv6Address
    kind: str

    def __str__(self) -> str:
        return f"GID {self.index} of {self.device} port {self.port}, {self.address} ({self.kind})"


def gids_of(device: str, node: str, devices: Path = DEVICES) -> list[Gid]:
    """The GIDs of `device` that belong to the IP address `node`, by port and index."""
    wanted = _as_ipv6(node)
    found: list[Gid] = []
    for entry in devices.glob(f"{device}/ports/*/gids/*"):
        if wanted != ipaddress.IPv6Address(entry.read_text().strip()):
            continue
        port, index = entry.parent.parent, int(entry.name)
        try:
            kind = (port / "gid_attrs" / "types" / entry.name).read_text().strip()
        except OSError:  # the kernel answers so for entries that are not in use
            continue
        found.append(Gid(device, int(port.name), index, wanted, kind))
    return sorted(found, key=lambda gid: (gid.port, gid.index))


def choose(
    device: str,
    node: str,
    version: str | None = None,
    traffic_class: int | None = None,
    devices: Path = DEVICES,
    defaults: Path = DEFAULTS,
) -> Gid | None:
    """Sets what is given as the default of the port that has `node`, and returns the GID that connections will use.

    `version`: v1 or v2; `traffic_class`: 0 to 255. None where the device has InfiniBand's links: those have GIDs, but
    not by IP address. Raises RoceNotConfigurable.
    """
    if all(link.read_text().strip() == "InfiniBand" for link in devices.glob(f"{device}/ports/*/link_layer")):
        if version is not None or traffic_class is not None:
            raise RoceNotConfigurable(f"{device} has no Ethernet port: it takes no option of RoCE", device=device)
        return None
    gids = gids_of(device, node, devices)
    if not gids:
        raise RoceNotConfigurable(
            f"no GID of {device} belongs to {node}; give agent.node an address of its network interface",
            device=device,
            node=node,
        )
    port = defaults / device / "ports" / str(gids[0].port)
    options = {
        "default_roce_mode": None if version is None else VERSIONS[version],
        "default_roce_tos": None if traffic_class is None else str(traffic_class),
    }
    for name, value in options.items():
        if value is not None:
            _set(defaults, port, name, value)
    mode = _read(port / "default_roce_mode") if version is None else VERSIONS[version]
    # Where the kernel does not say, it prefers v2.
    return next((gid for gid in gids if gid.kind == (mode or VERSIONS["v2"])), gids[0])


def _set(defaults: Path, port: Path, name: str, value: str) -> None:
    try:
        # A device's directory appears when somebody asks for it.
        (defaults / port.parent.parent.name).mkdir(exist_ok=True)
        (port / name).write_text(value)
    except OSError as error:
        raise RoceNotConfigurable(
            f"{port / name} does not take {value!r}: {error.strerror}; it needs root, configfs and the module rdma_cm",
            option=name,
            value=value,
            error=error.strerror or "",
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _as_ipv6(node: str) -> ipaddress.IPv6Address:
    try:
        address = ipaddress.ip_address(node)
    except ValueError as error:
        raise RoceNotConfigurable(f"agent.node is {node!r}; verbs needs an IP address", node=node) from error
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(f"::ffff:{address}")
    return address
