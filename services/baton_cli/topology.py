"""`baton topology`: what was found of this node, which domains and CPUs each GPU gets, and what its agent has open."""

import asyncio
import os
from pathlib import Path

import grpc
from baton.v1 import agent_pb2, agent_pb2_grpc
from rich.console import Console
from rich.table import Table

from baton_cli.timeline import format_bytes
from baton_config.sections import AgentSettings
from baton_fabric.assignment import DomainGroup, groups_of_agent
from baton_fabric.topology import Nic, Topology, read_topology
from baton_rpc import open_channel

THIS_NODE = Path("/sys")
# An agent of this node answers at once, or not at all.
ANSWER_S = 2.0


def show(console: Console, sysfs: Path, agent: AgentSettings) -> None:
    """Raises FabricError for domains in the configuration that the node does not have."""
    # Of another node nobody knows which CPUs a process may use there.
    allowed = os.sched_getaffinity(0) if sysfs == THIS_NODE else None
    found = read_topology(sysfs, allowed)
    groups = groups_of_agent(found, agent.transport, agent.node, agent.domains_by_device)
    tables = [_devices(found), _interfaces(found), _groups(groups)]
    running = asyncio.run(_running(agent.socket)) if sysfs == THIS_NODE else []
    if running:
        tables.append(_open(running))
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()
    if running is None:
        console.print(
            f"No agent answers at {agent.socket}. Those of `baton up` are named in cluster.json in its run directory; "
            "ask one by --set agent.socket=ADDRESS.",
            highlight=False,
        )
        console.print()
    console.print(f"CPUs: {_cpus(found.allowed)} of {_cpus(found.cpus)} may be used; {_numa(found)}")


def _devices(found: Topology) -> Table:
    table = _table("GPUs and RDMA devices", "device", "PCI", "NUMA", "kind", "link", "interfaces")
    for gpu in found.gpus:
        table.add_row(f"GPU {gpu.index}", gpu.place.address, _node(gpu.place.numa), gpu.vendor, "", "")
    for nic in found.nics:
        table.add_row(
            nic.name, nic.place.address, _node(nic.place.numa), nic.vendor, _link(nic), ", ".join(nic.interfaces)
        )
    return table


def _interfaces(found: Topology) -> Table:
    table = _table("Network interfaces", "interface", "PCI", "NUMA", "link")
    for interface in found.interfaces:
        link = f"{interface.gbps:g} Gb/s" if interface.gbps else "up"
        table.add_row(
            interface.name, interface.place.address, _node(interface.place.numa), link if interface.up else "down"
        )
    return table


def _groups(groups: list[DomainGroup]) -> Table:
    table = _table("Domains", "memory on", "domains", "why", "distance", "Gb/s", "progress thread near")
    for group in groups:
        cpu = "" if group.progress_cpu is None else f", best {group.progress_cpu}"
        table.add_row(
            group.device,
            ", ".join(domain.name for domain in group.domains),
            group.choice.value,
            "" if group.distance is None else group.distance.name.lower(),
            f"{group.gbps:g}" if group.gbps else "",
            f"{_cpus(group.cpus)}{cpu}",
        )
    return table


async def _running(socket: str) -> list[agent_pb2.FabricDomain] | None:
    """What the agent there has open; None if none is there."""
    async with open_channel(socket) as channel:
        try:
            stub = agent_pb2_grpc.TransferAgentStub(channel)
            answer = await stub.Describe(agent_pb2.DescribeRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError:
            return None
    return list(answer.domains)


def _open(domains: list[agent_pb2.FabricDomain]) -> Table:
    table = _table(
        "Open in the running agent", "domain", "provider", "bound to", "memory on", "written", "writes", "immediates"
    )
    for domain in domains:
        bound = ", ".join(dict.fromkeys(each for each in (domain.device, domain.address) if each))
        counts = format_bytes(domain.bytes), str(domain.writes), str(domain.immediates)
        table.add_row(domain.name, domain.provider, bound, ", ".join(domain.serves), *counts)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _link(nic: Nic) -> str:
    ports = (
        f"{port.gbps:g} Gb/s {port.link_layer}" if port.active else f"port {port.number} {port.state}"
        for port in nic.ports
    )
    return ", ".join(ports)


def _node(numa: int | None) -> str:
    return "" if numa is None else str(numa)


def _numa(found: Topology) -> str:
    nodes = (
        f"NUMA node {node.number}"
        + ("" if node.socket is None else f" (socket {node.socket})")
        + f": {_cpus(node.cpus)}"
        for node in found.numa_nodes
    )
    return "; ".join(nodes) or "no NUMA nodes"


def _cpus(cpus: tuple[int, ...]) -> str:
    """As the kernel writes a cpulist: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
