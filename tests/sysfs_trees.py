"""Builds trees of files and links like the kernel's /sys, as far as topology detection reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NVIDIA, AMD, MELLANOX, AMAZON, ASPEED = "0x10de", "0x1002", "0x15b3", "0x1d0f", "0x1a03"
CLASS_3D, CLASS_VGA, CLASS_NET, CLASS_INFINIBAND, CLASS_BRIDGE = (
    "0x030200",
    "0x030000",
    "0x020000",
    "0x020700",
    "0x060400",
)


def cpulist(cpus: Sequence[int]) -> str:
    """As the kernel writes it: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class SysfsTree:
    """`root` takes the place of /sys. Bridges are named by their path: "pci0000:00/0000:00:01.0"."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.numa_cpus: dict[int, list[int]] = {}

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        """Relative, as the kernel's are."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    # --- CPUs -----------------------------------------------------------------------------------------------------

    def cpus(self, nodes: Sequence[tuple[int, Sequence[int]]], threads: int = 1, numa: bool = True) -> None:
        """`nodes`: (socket, CPUs) of each NUMA node. `threads`: of a core, numbered apart as on most servers: those of
        core i are i, i + cores, ..."""
        every = [cpu for _, cpus in nodes for cpu in cpus]
        cores = len(every) // threads
        self.write("devices/system/cpu/online", cpulist(every))
        for number, (socket, cpus) in enumerate(nodes):
            self.numa_cpus[number] = list(cpus)
            if numa:
                self.write(f"devices/system/node/node{number}/cpulist", cpulist(cpus))
            for cpu in cpus:
                place = f"devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{place}/physical_package_id", socket)
                core = cpu % cores
                self.write(f"{place}/thread_siblings_list", cpulist([core + cores * i for i in range(threads)]))

    # --- PCI ------------------------------------------------------------------------------------------------------

    def pci(self, bridge: str, address: str, kind: str, vendor: str, numa: int = -1) -> str:
        """A device behind a bridge (which may be a host bridge) -> its path."""
        path = f"{bridge}/{address}"
        device = f"devices/{path}"
        self.write(f"{device}/class", kind)
        self.write(f"{device}/vendor", vendor)
        self.write(f"{device}/numa_node", numa)
        local = self.numa_cpus.get(numa) or [cpu for cpus in self.numa_cpus.values() for cpu in cpus]
        self.write(f"{device}/local_cpulist", cpulist(local))
        self.link(f"bus/pci/devices/{address}", device)
        return path

    def switch(self, bridge: str, bus: int, downstream: int, numa: int = -1, domain: str = "0000") -> list[str]:
        """A switch below a root port: upstream port at bus:00.0, downstream ports at the next bus -> their paths."""
        upstream = self.pci(bridge, f"{domain}:{bus:02x}:00.0", CLASS_BRIDGE, "0x1000", numa)
        return [
            self.pci(upstream, f"{domain}:{bus + 1:02x}:{port:02x}.0", CLASS_BRIDGE, "0x1000", numa)
            for port in range(downstream)
        ]

    def gpu(self, bridge: str, address: str, numa: int = -1, vendor: str = NVIDIA, kind: str = CLASS_3D) -> None:
        self.pci(bridge, address, kind, vendor, numa)

    # --- networks -------------------------------------------------------------------------------------------------

    def nic(
        self,
        bridge: str,
        address: str,
        name: str,
        *,
        numa: int = -1,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        link_layer: str = "InfiniBand",
        vendor: str = MELLANOX,
        interface: str | None = None,
        speed: int | None = None,
        operstate: str = "up",
        ports: int = 1,
    ) -> None:
        """An RDMA device and, if named, its network interface (`speed` in Mb/s; None: not readable)."""
        path = self.pci(bridge, address, CLASS_INFINIBAND, vendor, numa)
        device = f"devices/{path}/infiniband/{name}"
        for port in range(1, ports + 1):
            self.write(f"{device}/ports/{port}/state", state)
            self.write(f"{device}/ports/{port}/rate", rate)
            self.write(f"{device}/ports/{port}/link_layer", link_layer)
        self.link(f"{device}/device", f"devices/{path}")
        self.link(f"class/infiniband/{name}", device)
        if interface is not None:
            self._interface(path, interface, speed, operstate)

    def ethernet(
        self, bridge: str, address: str, interface: str, speed: int | None, operstate: str = "up", numa: int = -1
    ) -> None:
        """A network interface without RDMA."""
        self._interface(self.pci(bridge, address, CLASS_NET, "0x8086", numa), interface, speed, operstate)

    def virtual_interface(self, name: str) -> None:
        """lo, a bridge, one end of a veth pair."""
        self.write(f"devices/virtual/net/{name}/operstate", "unknown")
        self.link(f"class/net/{name}", f"devices/virtual/net/{name}")

    def soft_roce(self, name: str, interface: str, rate: str = "2.5 Gb/sec (1X SDR)") -> None:
        device = f"devices/virtual/infiniband/{name}"
        self.write(f"{device}/parent", interface)
        self.write(f"{device}/ports/1/state", "4: ACTIVE")
        self.write(f"{device}/ports/1/rate", rate)
        self.write(f"{device}/ports/1/link_layer", "Ethernet")
        self.link(f"class/infiniband/{name}", device)

    def _interface(self, path: str, name: str, speed: int | None, operstate: str) -> None:
        device = f"devices/{path}/net/{name}"
        self.write(f"{device}/operstate", operstate)
        if speed is not None:
            self.write(f"{device}/speed", speed)
        self.link(f"{device}/device", f"devices/{path}")
        self.link(f"class/net/{name}", device)


def dual_socket(root: Path, *, down: Sequence[str] = (), numa: bool = True) -> SysfsTree:
    """8 GPUs and 8 InfiniBand NICs in 4 switches a socket: a GPU and a NIC below each, each switch at a root complex of
    its own. 2 x 32 cores of 2 threads; a BMC, and a 25 Gb/s RoCE NIC for management."""
    tree = SysfsTree(root)
    tree.cpus(
        [(0, [*range(32), *range(64, 96)]), (1, [*range(32, 64), *range(96, 128)])] if numa else [(0, range(128))],
        threads=2,
        numa=numa,
    )
    for index in range(8):
        socket = index // 4 if numa else -1
        bus = 0x10 * (index + 1)
        host = f"pci0000:{bus:02x}"
        port = tree.pci(host, f"0000:{bus:02x}:01.0", CLASS_BRIDGE, "0x8086", socket)
        for_gpu, for_nic = tree.switch(port, bus + 1, 2, socket)
        tree.gpu(for_gpu, f"0000:{bus + 3:02x}:00.0", socket)
        name = f"mlx5_{index}"
        state, rate = ("1: DOWN", "40 Gb/sec (4X QDR)") if name in down else ("4: ACTIVE", "400 Gb/sec (4X NDR)")
        interface = {"interface": f"ibp{bus + 4}s0", "operstate": "down" if name in down else "up"}
        tree.nic(for_nic, f"0000:{bus + 4:02x}:00.0", name, numa=socket, state=state, rate=rate, **interface)
    first = 0 if numa else -1
    tree.gpu("pci0000:00", "0000:00:02.0", first, vendor=ASPEED, kind=CLASS_VGA)
    tree.nic(
        "pci0000:00",
        "0000:00:1c.0",
        "mlx5_8",
        numa=first,
        rate="25 Gb/sec (1X EDR)",
        link_layer="Ethernet",
        interface="eno1",
        speed=25000,
    )
    tree.ethernet("pci0000:00", "0000:00:1f.0", "eno2", None, "down", numa=first)
    tree.virtual_interface("lo")
    return tree


def sixteen_efa(root: Path) -> SysfsTree:
    """8 GPUs, each with 2 EFA devices below one switch; 2 sockets of 2 NUMA nodes each."""
    tree = SysfsTree(root)
    tree.cpus([(number // 2, range(number * 24, (number + 1) * 24)) for number in range(4)])
    for index in range(8):
        node, bus = index // 2, 0x10 * (index + 1)
        port = tree.pci(f"pci0000:{bus:02x}", f"0000:{bus:02x}:00.0", CLASS_BRIDGE, "0x1d0f", node)
        ports = tree.switch(port, bus + 1, 3, node)
        tree.gpu(ports[0], f"0000:{bus + 3:02x}:00.0", node)
        for efa in range(2):
            tree.nic(
                ports[1 + efa],
                f"0000:{bus + 4 + efa:02x}:00.0",
                f"rdmap{bus + 4 + efa}s0",
                numa=node,
                rate="200 Gb/sec (4X HDR)",
                link_layer="Unspecified",
                vendor=AMAZON,
            )
    return tree


def flat_guest(root: Path, gpus: int, nics: int, rates: Sequence[str] = ()) -> SysfsTree:
    """A virtual machine: everything on one bus, no NUMA nodes known, 16 CPUs."""
    tree = SysfsTree(root)
    tree.cpus([(0, range(16))], numa=False)
    for index in range(gpus):
        tree.gpu("pci0000:00", f"0000:00:{index + 4:02x}.0")
    for index in range(nics):
        rate = rates[index] if rates else "100 Gb/sec (4X EDR)"
        tree.nic("pci0000:00", f"0000:00:{index + 0x14:02x}.0", f"mlx5_{index}", rate=rate, link_layer="Ethernet")
    return tree


def plain_machine(root: Path) -> SysfsTree:
    """No GPU, no RDMA device: 2 CPUs and a virtio interface."""
    tree = SysfsTree(root)
    tree.cpus([(0, range(2))])
    path = tree.pci("pci0000:00", "0000:00:03.0", CLASS_NET, "0x1af4")
    tree.write(f"devices/{path}/virtio2/net/eth0/operstate", "up")
    tree.write(f"devices/{path}/virtio2/net/eth0/speed", -1)
    tree.link(f"devices/{path}/virtio2/net/eth0/device", f"devices/{path}/virtio2")
    tree.link("class/net/eth0", f"devices/{path}/virtio2/net/eth0")
    tree.virtual_interface("lo")
    return tree
