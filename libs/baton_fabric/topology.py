"""What sysfs says of a node: its GPUs, RDMA devices and network interfaces, where each sits, and which CPUs are near.

Nothing here looks at hardware: a tree of files and links goes in, values come out. What can't be read is left unknown;
inside containers and guests that is normal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x15b3": "Mellanox", "0x1d0f": "Amazon", "0x8086": "Intel"}
# PCI classes: 3D controller, processing accelerator; VGA controllers are mostly the board's own, but for NVIDIA's.
_GPU_CLASSES = ("0x0302", "0x1200")
_VGA_CLASS = "0x0300"
_ACTIVE = 4  # of a port of an RDMA device


class Distance(IntEnum):
    """How far two devices are apart, nearest first."""

    SWITCH = 0
    """Behind one PCI switch: what they exchange does not pass the root complex."""
    ROOT = 1
    """At one root complex."""
    NUMA = 2
    """At different root complexes of one NUMA node, or of a machine that has only one."""
    SOCKET = 3
    """At different NUMA nodes of one socket."""
    SYSTEM = 4
    """At different sockets, or it is not known."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits.

    `path`: host bridge, then PCI addresses down to the device's own; empty where it is on no PCI bus. `numa`: None
    where the kernel says -1. `cpus`: those that the kernel calls local to it.
    """

    path: tuple[str, ...] = ()
    numa: int | None = None
    cpus: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """PCI address, such as 0000:1b:00.0; empty where there is none."""
        return self.path[-1] if self.path else ""

    def hops(self, other: Place) -> int:
        """Edges of the PCI tree between two devices at one root complex."""
        return len(self.path) + len(other.path) - 2 * _common(self, other)


# From an entry of sysfs to its place.
PlaceOf = Callable[[Path], Place]


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index` counts by PCI address, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    vendor: str
    place: Place

    @property
    def name(self) -> str:
        return self.place.address


@dataclass(frozen=True, slots=True)
class Port:
    """`gbps`: Gb/s, 0 if not known. `state`: the kernel's word, such as ACTIVE, DOWN, INIT."""

    number: int
    state: str
    active: bool
    gbps: float
    link_layer: str


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device, such as mlx5_0, rdmap0s6 or rxe0. `interfaces`: its network interfaces."""

    name: str
    vendor: str
    place: Place
    ports: tuple[Port, ...]
    interfaces: tuple[str, ...]

    @property
    def active(self) -> bool:
        """At least one port has a link."""
        return any(port.active for port in self.ports)

    @property
    def gbps(self) -> float:
        """Of all ports with a link together."""
        return sum(port.gbps for port in self.ports if port.active)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of a device (not lo, bridges, or what else is only software)."""

    name: str
    place: Place
    up: bool
    gbps: float


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    socket: int | None
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """One node. `allowed`: the CPUs that this process may use, which may be few of them."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    interfaces: tuple[Interface, ...]
    numa_nodes: tuple[NumaNode, ...]
    cpus: tuple[int, ...]
    allowed: tuple[int, ...]
    # CPUs that are threads of one core, by CPU.
    siblings: dict[int, tuple[int, ...]]

    def distance(self, one: Place, other: Place) -> Distance:
        common = _common(one, other)
        if common >= 2:
            return Distance.SWITCH
        if common == 1:
            return Distance.ROOT
        if len(self.numa_nodes) <= 1:
            return Distance.NUMA
        if one.numa is None or other.numa is None:
            return Distance.SYSTEM
        if one.numa == other.numa:
            return Distance.NUMA
        sockets = {node.socket for node in self.numa_nodes if node.number in (one.numa, other.numa)}
        return Distance.SOCKET if len(sockets) == 1 and None not in sockets else Distance.SYSTEM

    def near_cpus(self, places: Iterable[Place]) -> tuple[int, ...]:
        """CPUs that this process may use and that are local to all of the places; if there are none, to any of them; if
        there are none of these either, all that it may use."""
        local = [set(place.cpus) for place in places if place.cpus]
        allowed = set(self.allowed)
        if local:
            for near in (set.intersection(*local), set.union(*local)):
                if near & allowed:
                    return tuple(sorted(near & allowed))
        return self.allowed


def read_topology(sysfs: Path = Path("/sys"), allowed: Iterable[int] | None = None) -> Topology:
    """`sysfs`: root of the tree. `allowed`: by default all CPUs that are online; os.sched_getaffinity knows better."""
    cpus = parse_cpulist(_read(sysfs / "devices/system/cpu/online"))
    numa_nodes = _numa_nodes(sysfs)
    by_number = {node.number: node for node in numa_nodes}
    usable = cpus if allowed is None else tuple(sorted(set(allowed)))

    def place(entry: Path) -> Place:
        return _place(entry, by_number, cpus)

    interfaces = _interfaces(sysfs, place)
    return Topology(
        gpus=_gpus(sysfs, place),
        nics=_nics(sysfs, place, {interface.name: interface for interface in interfaces}),
        interfaces=tuple(interfaces),
        numa_nodes=numa_nodes,
        cpus=cpus,
        allowed=usable,
        siblings={
            cpu: parse_cpulist(_read(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or (cpu,)
            for cpu in cpus
        },
    )


def parse_cpulist(text: str) -> tuple[int, ...]:
    """ "0-3,8" as the kernel writes it. What is no such list is an empty one."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return ()
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def _gpus(sysfs: Path, place: PlaceOf) -> tuple[Gpu, ...]:
    found: list[tuple[str, Place]] = []
    for entry in _entries(sysfs / "bus/pci/devices"):
        kind, vendor = _read(entry / "class")[:6], _read(entry / "vendor")
        if kind in _GPU_CLASSES or (kind == _VGA_CLASS and _VENDORS.get(vendor) == "NVIDIA"):
            found.append((_vendor(vendor), place(entry)))
    found.sort(key=lambda gpu: gpu[1].address)
    return tuple(Gpu(index, *gpu) for index, gpu in enumerate(found))


def _nics(sysfs: Path, place: PlaceOf, interfaces: dict[str, Interface]) -> tuple[Nic, ...]:
    nics: list[Nic] = []
    for entry in _entries(sysfs / "class/infiniband"):
        # Soft-RoCE has no device of its own, but an interface that it sits on.
        parent = _read(entry / "parent")
        own = tuple(net.name for net in _entries(entry / "device/net")) or ((parent,) if parent else ())
        where = place(entry)
        if not where.path and parent in interfaces:
            where = interfaces[parent].place
        ports = tuple(sorted((_port(port) for port in _entries(entry / "ports")), key=lambda port: port.number))
        nics.append(Nic(entry.name, _vendor(_read(entry / "device/vendor")), where, ports, own))
    return tuple(sorted(nics, key=lambda nic: (nic.place.path, _natural(nic.name))))


def _port(entry: Path) -> Port:
    """state is "4: ACTIVE", rate "400 Gb/sec (4X NDR)"."""
    number, _, word = _read(entry / "state").partition(":")
    rate = _read(entry / "rate").partition(" ")[0]
    active = number.strip() == str(_ACTIVE)
    return Port(
        int(entry.name), word.strip() or "unknown", active, _number(rate), _read(entry / "link_layer") or "unknown"
    )


def _interfaces(sysfs: Path, place: PlaceOf) -> list[Interface]:
    found: list[Interface] = []
    for entry in _entries(sysfs / "class/net"):
        if not (entry / "device").exists():
            continue
        # Mb/s; -1, or an error on reading, while there is no link.
        speed = max(0.0, _number(_read(entry / "speed")))
        found.append(Interface(entry.name, place(entry), _read(entry / "operstate") == "up", speed / 1000))
    return sorted(found, key=lambda interface: (interface.place.path, _natural(interface.name)))


def _numa_nodes(sysfs: Path) -> tuple[NumaNode, ...]:
    nodes: list[NumaNode] = []
    for entry in _entries(sysfs / "devices/system/node"):
        if re.fullmatch(r"node\d+", entry.name):
            cpus = parse_cpulist(_read(entry / "cpulist"))
            socket = _read(sysfs / f"devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id") if cpus else ""
            nodes.append(NumaNode(int(entry.name[4:]), int(socket) if socket.isdecimal() else None, cpus))
    return tuple(sorted(nodes, key=lambda node: node.number))


def _place(entry: Path, numa_nodes: dict[int, NumaNode], online: tuple[int, ...]) -> Place:
    """The links of /sys/class and /sys/bus lead into the tree of devices; the directories above an entry are the
    bridges that it is behind."""
    real = Path(os.path.realpath(entry))
    path: list[str] = []
    device = real
    for part in [*reversed(real.parents), real]:
        if _HOST_BRIDGE.fullmatch(part.name):
            path = [part.name]
        elif path and _ADDRESS.fullmatch(part.name):
            path.append(part.name)
            device = part
    if len(path) < 2:
        return Place()
    text = _read(device / "numa_node")
    numa = int(text) if text.isdecimal() else None
    cpus = parse_cpulist(_read(device / "local_cpulist"))
    if not cpus:
        cpus = numa_nodes[numa].cpus if numa in numa_nodes else online
    return Place(tuple(path), numa, cpus)


def _common(one: Place, other: Place) -> int:
    """How many levels of the PCI tree two devices share, the host bridge first; the devices themselves don't count."""
    shared = 0
    for left, right in zip(one.path[:-1], other.path[:-1], strict=False):
        if left != right:
            break
        shared += 1
    return shared


def _entries(directory: Path) -> Sequence[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return ()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_10 after mlx5_2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _vendor(number: str) -> str:
    return _VENDORS.get(number, number)
