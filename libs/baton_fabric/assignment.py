"""Which domains (NICs, or local addresses) each device's memory is written through, and on which CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from .errors import FabricError
from .topology import Distance, Gpu, Nic, Place, Topology

HOST = "host"
ALL = "*"
# That go by RDMA devices; tcp, auto, local and shm don't.
RDMA_TRANSPORTS = ("verbs", "efa")
# Of the fastest NIC's speed. What is below belongs to the management or storage network; bytes are spread evenly over a
# group, so that its slowest NIC decides.
SLOWEST = 0.5


class Choice(StrEnum):
    """Why a device has the domains that it has."""

    CONFIGURED = "configured"
    NEAREST = "nearest"
    NO_RDMA = "no active RDMA device"
    ADDRESS = "agent.node"


@dataclass(frozen=True, slots=True)
class Domain:
    """`name`: an RDMA device, or a local address that tcp binds to. `nic`: None for an address."""

    name: str
    nic: Nic | None = None


@dataclass(frozen=True, slots=True)
class DomainGroup:
    """The domains of one device. `device`: a GPU's PCI address, or "host".

    `distance`: of the farthest of its NICs; None for the host and for addresses. `cpus`: those that the progress thread
    should be bound to one of, `progress_cpu` is the one that is suggested; None where no CPU is known.
    """

    device: str
    domains: tuple[Domain, ...]
    choice: Choice
    distance: Distance | None = None
    cpus: tuple[int, ...] = ()
    progress_cpu: int | None = None

    @property
    def gbps(self) -> float:
        """Of its NICs together, Gb/s."""
        return sum(domain.nic.gbps for domain in self.domains if domain.nic is not None)


def groups_of_agent(
    topology: Topology, transport: str, node: str, override: Mapping[str, Sequence[str]] | None = None
) -> list[DomainGroup]:
    """What an agent with these settings opens: see `assign`. The nearest NICs over verbs and efa only, and only where
    `node` names none, as an address of theirs: with its default, a loopback address. Otherwise `node` is the one domain
    of all devices that have no override. Raises FabricError(BAD_DOMAINS)."""
    rdma = transport.startswith(RDMA_TRANSPORTS) and (node == "localhost" or node.startswith(("127.", "::1")))
    return assign(topology, override, [node], nearest=rdma)


def assign(
    topology: Topology,
    override: Mapping[str, Sequence[str]] | None = None,
    addresses: Sequence[str] = (),
    nearest: bool = True,
) -> list[DomainGroup]:
    """Each GPU's group, in order of PCI address, and that of the host's memory last.

    `override`: names of RDMA devices or addresses by device: its PCI address, its index, "host", or "*" for all that
    are not named. For the others: the nearest active NICs, which GPUs that are equally near to them share evenly. Where
    all NICs near a GPU are nearer to others it gets as many as GPUs have on average, of those that fewest use. The
    host's memory uses all. NICs much slower than the fastest are left out. Without any active RDMA device, or unless
    the `nearest` are wanted: `addresses`.
    Raises FabricError(BAD_DOMAINS) for an override that names no device or no domain of this node.
    """
    chosen = _overrides(topology, override or {})
    active = _usable(topology.nics) if nearest else []
    names = [*(gpu.name for gpu in topology.gpus), HOST]
    near = _nearest(topology, active, chosen)
    groups: list[DomainGroup] = []
    for name in names:
        if name in chosen:
            groups.append(DomainGroup(name, chosen[name], Choice.CONFIGURED))
        elif active:
            nics = tuple(Domain(nic.name, nic) for nic in near[name])
            groups.append(DomainGroup(name, nics, Choice.NEAREST))
        else:
            why = Choice.NO_RDMA if nearest else Choice.ADDRESS
            groups.append(DomainGroup(name, tuple(map(Domain, addresses)), why))
    return _with_cpus(topology, [_with_distance(topology, group) for group in groups])


def _usable(nics: Sequence[Nic]) -> list[Nic]:
    active = [nic for nic in nics if nic.active]
    fastest = max((nic.gbps for nic in active), default=0.0)
    return [nic for nic in active if nic.gbps >= fastest * SLOWEST]


def _nearest(topology: Topology, active: Sequence[Nic], chosen: Mapping[str, Sequence[Domain]]) -> dict[str, list[Nic]]:
    """By device, as if none had an override: what was chosen by hand counts only in who uses what already."""
    gpus = topology.gpus
    if not active or not gpus:
        return {HOST: list(active)}
    near = {gpu.name: _near(topology, gpu, active) for gpu in gpus}
    # A NIC is claimed by those near ones that nobody is nearer than.
    claims: dict[tuple[str, ...], list[Nic]] = {}
    for nic in active:
        by_key: dict[tuple[int, int], list[str]] = {}
        for gpu in gpus:
            if nic in near[gpu.name]:
                by_key.setdefault(_key(topology, gpu.place, nic.place), []).append(gpu.name)
        if by_key:
            claims.setdefault(tuple(by_key[min(by_key)]), []).append(nic)
    given: dict[str, list[Nic]] = {gpu.name: [] for gpu in gpus}
    for claimants, nics in claims.items():
        for position, name in enumerate(claimants):
            given[name] += _share(nics, position, len(claimants))
    uses = Counter(user.name for gpu in gpus for user in chosen.get(gpu.name, given[gpu.name]))
    average = max(1, len(active) // len(gpus))
    for gpu in gpus:
        if not given[gpu.name] and gpu.name not in chosen:
            candidates = sorted(near[gpu.name], key=lambda nic: (uses[nic.name], gpu.place.hops(nic.place)))
            given[gpu.name] = candidates[:average]
            uses.update(nic.name for nic in given[gpu.name])
    return {**given, HOST: list(active)}


def _near(topology: Topology, gpu: Gpu, active: Sequence[Nic]) -> list[Nic]:
    least = min(_key(topology, gpu.place, nic.place) for nic in active)
    return [nic for nic in active if _key(topology, gpu.place, nic.place) == least]


def _key(topology: Topology, one: Place, other: Place) -> tuple[int, int]:
    """Behind one switch fewer hops are nearer: switches are cascaded. Elsewhere bridges say nothing."""
    distance = topology.distance(one, other)
    return distance, one.hops(other) if distance is Distance.SWITCH else 0


def _share(nics: Sequence[Nic], position: int, claimants: int) -> list[Nic]:
    """An even part of the NICs for each claimant; where they are fewer, one that it shares."""
    if len(nics) < claimants:
        return [nics[position * len(nics) // claimants]]
    return list(nics[position * len(nics) // claimants : (position + 1) * len(nics) // claimants])


def _overrides(topology: Topology, override: Mapping[str, Sequence[str]]) -> dict[str, tuple[Domain, ...]]:
    by_key = {str(gpu.index): gpu.name for gpu in topology.gpus} | {gpu.name: gpu.name for gpu in topology.gpus}
    by_key[HOST] = HOST
    chosen: dict[str, tuple[Domain, ...]] = {}
    for device, domains in override.items():
        if device == ALL:
            continue
        name = by_key.get(device.lower())
        if name is None:
            raise _bad(f"there is no device {device!r}; there are {', '.join([*by_key, ALL])}", device=device)
        chosen[name] = _domains(topology, device, domains)
    if ALL in override:
        everywhere = _domains(topology, ALL, override[ALL])
        chosen = dict.fromkeys(by_key.values(), everywhere) | chosen
    return chosen


def _domains(topology: Topology, device: str, names: Sequence[str]) -> tuple[Domain, ...]:
    if not names:
        raise _bad(f"device {device!r} has no domain; it needs at least one", device=device)
    nics = {nic.name: nic for nic in topology.nics}
    for name in names:
        # An address has dots or colons, and only the provider can say whether it is one of this node.
        if name not in nics and not ("." in name or ":" in name):
            raise _bad(
                f"there is no RDMA device {name!r}; there are {', '.join(nics) or 'none'}", device=device, domain=name
            )
    return tuple(Domain(name, nics.get(name)) for name in names)


def _with_distance(topology: Topology, group: DomainGroup) -> DomainGroup:
    gpu = next((gpu for gpu in topology.gpus if gpu.name == group.device), None)
    places = [domain.nic.place for domain in group.domains if domain.nic is not None]
    if gpu is None or not places:
        return group
    return replace(group, distance=max(topology.distance(gpu.place, place) for place in places))


def _with_cpus(topology: Topology, groups: Sequence[DomainGroup]) -> list[DomainGroup]:
    """Progress threads on cores of their own as long as there are enough. High numbers first: interrupts and whatever
    is bound by hand gather at the low ones."""
    gpus = {gpu.name: gpu for gpu in topology.gpus}
    cores, cpus = Counter[tuple[int, ...]](), Counter[int]()
    suggested: list[DomainGroup] = []
    for group in groups:
        places = [domain.nic.place for domain in group.domains if domain.nic is not None]
        if not places and group.device in gpus:
            places = [gpus[group.device].place]
        near = topology.near_cpus(places)
        best = min(near, key=lambda cpu: (cores[_core(topology, cpu)], cpus[cpu], -cpu), default=None)
        if best is not None:
            cores[_core(topology, best)] += 1
            cpus[best] += 1
        suggested.append(replace(group, cpus=near, progress_cpu=best))
    return suggested


def _core(topology: Topology, cpu: int) -> tuple[int, ...]:
    return topology.siblings.get(cpu, (cpu,))


def _bad(message: str, **fields: str) -> FabricError:
    return FabricError(f"agent.domains: {message}", "INVALID_ARGUMENT", "BAD_DOMAINS", fields)
