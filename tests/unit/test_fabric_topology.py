"""Topology detection on made sysfs trees, and which NICs and CPUs each GPU gets."""

from __future__ import annotations

import tempfile
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_agent.domains import Domains
from baton_fabric.assignment import Choice, DomainGroup, assign, groups_of_agent
from baton_fabric.errors import FabricError
from baton_fabric.topology import Distance, Topology, parse_cpulist, read_topology
from sysfs_trees import (
    AMD,
    CLASS_BRIDGE,
    SysfsTree,
    cpulist,
    dual_socket,
    flat_guest,
    plain_machine,
    sixteen_efa,
)


def groups(topology: Topology, **options: object) -> dict[str, DomainGroup]:
    return {group.device: group for group in assign(topology, **options)}  # type: ignore[arg-type]


def names(group: DomainGroup) -> list[str]:
    return [domain.name for domain in group.domains]


def by_index(topology: Topology, **options: object) -> list[list[str]]:
    """Domains of each GPU."""
    return [names(group) for group in assign(topology, **options)[: len(topology.gpus)]]  # type: ignore[arg-type]


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_server_with_two_sockets(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_2"])
    found = read_topology(tmp_path)
    assert [gpu.name for gpu in found.gpus] == [f"0000:{0x10 * i + 3:02x}:00.0" for i in range(1, 9)]
    assert {gpu.vendor for gpu in found.gpus} == {"NVIDIA"}, "the board's own VGA is no GPU"
    assert [gpu.place.numa for gpu in found.gpus] == [0] * 4 + [1] * 4
    assert [(node.socket, len(node.cpus)) for node in found.numa_nodes] == [(0, 64), (1, 64)]
    nics = {nic.name: nic for nic in found.nics}
    assert nics["mlx5_0"].active
    assert (nics["mlx5_0"].gbps, nics["mlx5_0"].interfaces, nics["mlx5_0"].vendor) == (400, ("ibp20s0",), "Mellanox")
    (port,) = nics["mlx5_2"].ports
    assert (port.state, port.active, nics["mlx5_2"].gbps) == ("DOWN", False, 0)
    interfaces = {interface.name: interface for interface in found.interfaces}
    assert (interfaces["eno1"].up, interfaces["eno1"].gbps) == (True, 25)
    assert (interfaces["eno2"].up, interfaces["eno2"].gbps) == (False, 0)
    assert "lo" not in interfaces
    assert found.siblings[3] == (3, 67)


def test_distances(tmp_path: Path) -> None:
    dual_socket(tmp_path / "two")
    found = read_topology(tmp_path / "two")
    gpus = [gpu.place for gpu in found.gpus]
    nics = {nic.name: nic.place for nic in found.nics}
    assert found.distance(gpus[0], nics["mlx5_0"]) is Distance.SWITCH
    assert gpus[0].hops(nics["mlx5_0"]) == 4
    assert found.distance(gpus[0], nics["mlx5_1"]) is Distance.NUMA
    assert found.distance(gpus[0], nics["mlx5_7"]) is Distance.SYSTEM
    sixteen_efa(tmp_path / "efa")
    found = read_topology(tmp_path / "efa")
    assert found.distance(found.gpus[0].place, found.gpus[1].place) is Distance.NUMA
    assert found.distance(found.gpus[0].place, found.gpus[3].place) is Distance.SOCKET
    assert found.distance(found.gpus[0].place, found.gpus[4].place) is Distance.SYSTEM
    flat_guest(tmp_path / "guest", 2, 2)
    found = read_topology(tmp_path / "guest")
    assert found.distance(found.gpus[0].place, found.nics[1].place) is Distance.ROOT
    for one, other in combinations([*gpus, *nics.values()], 2):
        assert found.distance(one, other) == found.distance(other, one)


def test_without_numa_nothing_is_said_of_it(tmp_path: Path) -> None:
    dual_socket(tmp_path, numa=False)
    found = read_topology(tmp_path)
    assert found.numa_nodes == ()
    assert {gpu.place.numa for gpu in found.gpus} == {None}
    assert found.gpus[0].place.cpus == tuple(range(128))
    # Other root complexes of what may be one NUMA node.
    assert found.distance(found.gpus[0].place, found.gpus[7].place) is Distance.NUMA


def test_numa_nodes_without_the_devices_numa(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.cpus([(0, [0, 1]), (1, [2, 3])])
    tree.gpu("pci0000:00", "0000:00:04.0", -1)
    tree.gpu("pci0000:40", "0000:40:04.0", 1)
    found = read_topology(tmp_path)
    assert found.distance(found.gpus[0].place, found.gpus[1].place) is Distance.SYSTEM


def test_a_virtio_interface_and_nothing_else(tmp_path: Path) -> None:
    plain_machine(tmp_path)
    found = read_topology(tmp_path)
    assert (found.gpus, found.nics, found.cpus) == ((), (), (0, 1))
    (interface,) = found.interfaces
    assert (interface.name, interface.place.address, interface.up, interface.gbps) == ("eth0", "0000:00:03.0", True, 0)


def test_soft_roce_sits_where_its_interface_does(tmp_path: Path) -> None:
    plain_machine(tmp_path).soft_roce("rxe0", "eth0")
    (nic,) = read_topology(tmp_path).nics
    assert (nic.name, nic.place.address, nic.interfaces, nic.gbps) == ("rxe0", "0000:00:03.0", ("eth0",), 2.5)


def test_several_ports_and_other_vendors(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.cpus([(0, range(4))])
    tree.gpu("pci0000:00", "0000:00:05.0", 0, vendor=AMD, kind="0x120000")
    tree.nic("pci0000:00", "0000:00:06.0", "mlx5_0", ports=2, rate="100 Gb/sec (4X EDR)")
    found = read_topology(tmp_path)
    assert found.gpus[0].vendor == "AMD"
    assert [port.number for port in found.nics[0].ports] == [1, 2]
    assert found.nics[0].gbps == 200


def test_an_empty_tree_and_files_of_nonsense_are_no_error(tmp_path: Path) -> None:
    found = read_topology(tmp_path)
    assert (found.gpus, found.nics, found.interfaces, found.numa_nodes, found.cpus) == ((), (), (), (), ())
    assert assign(found, addresses=["10.0.0.1"])[0].progress_cpu is None
    tree = flat_guest(tmp_path, 1, 1)
    for file in ("ports/1/state", "ports/1/rate", "ports/1/link_layer"):
        (tmp_path / "class/infiniband/mlx5_0" / file).write_bytes(b"\xff\xfe")
    for file in ("numa_node", "local_cpulist"):
        (tmp_path / "bus/pci/devices/0000:00:04.0" / file).write_text("?\n")
    tree.write("devices/system/cpu/online", "0-x")
    found = read_topology(tmp_path)
    assert not found.nics[0].active
    assert found.gpus[0].place.numa is None
    assert found.cpus == ()


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_read_back(cpus: set[int]) -> None:
    assert parse_cpulist(cpulist(sorted(cpus)) + "\n") == tuple(sorted(cpus))


def test_this_machine_can_be_read() -> None:
    found = read_topology()
    assert found.cpus
    assert assign(found, addresses=["127.0.0.1"])[-1].domains


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_each_gpu_has_the_nic_at_its_switch(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    found = read_topology(tmp_path)
    assert by_index(found) == [[f"mlx5_{index}"] for index in range(8)]
    chosen = assign(found)
    assert all(group.distance is Distance.SWITCH and group.choice is Choice.NEAREST for group in chosen[:8])
    assert chosen[0].gbps == 400
    # Not the slow one of the management network.
    assert (chosen[8].device, names(chosen[8])) == ("host", [f"mlx5_{index}" for index in range(8)])


def test_progress_threads_have_cores_of_their_own_near_the_nics(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    chosen = assign(read_topology(tmp_path))[:8]
    cpus = [group.progress_cpu for group in chosen]
    assert len({cpu % 64 for cpu in cpus if cpu is not None}) == 8, "no two threads of one core"
    for group in chosen:
        assert group.progress_cpu in group.cpus
    assert set(chosen[0].cpus) == {*range(32), *range(64, 96)}
    assert set(chosen[7].cpus) == {*range(32, 64), *range(96, 128)}


def test_eight_gpus_with_two_efa_devices_each(tmp_path: Path) -> None:
    sixteen_efa(tmp_path)
    found = read_topology(tmp_path)
    assert by_index(found) == [[f"rdmap{0x10 * i + 4}s0", f"rdmap{0x10 * i + 5}s0"] for i in range(1, 9)]
    assert {group.gbps for group in assign(found)[:8]} == {400}


def test_a_gpu_whose_nic_is_down_uses_one_of_its_numa_node(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_6"])
    found = read_topology(tmp_path)
    chosen = by_index(found)
    assert chosen[6] == ["mlx5_4"]
    assert [each for index, each in enumerate(chosen) if index != 6] == [
        [f"mlx5_{index}"] for index in range(8) if index != 6
    ]
    assert assign(found)[6].distance is Distance.NUMA


def test_gpus_whose_nics_are_down_do_not_all_use_the_same_one(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_0", "mlx5_1"])
    chosen = by_index(read_topology(tmp_path))
    assert chosen[:2] == [["mlx5_2"], ["mlx5_3"]]


def test_what_was_chosen_by_hand_counts_as_used(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_0"])
    chosen = by_index(read_topology(tmp_path), override={"3": ["mlx5_1", "mlx5_2"]})
    assert chosen[:4] == [["mlx5_3"], ["mlx5_1"], ["mlx5_2"], ["mlx5_1", "mlx5_2"]]


def test_a_whole_socket_without_nics_goes_to_the_other(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=[f"mlx5_{index}" for index in range(4, 8)])
    found = read_topology(tmp_path)
    assert sorted(each for group in by_index(found)[4:] for each in group) == [f"mlx5_{index}" for index in range(4)]
    assert assign(found)[4].distance is Distance.SYSTEM


def test_without_numa_switches_still_decide(tmp_path: Path) -> None:
    dual_socket(tmp_path, numa=False)
    assert by_index(read_topology(tmp_path)) == [[f"mlx5_{index}"] for index in range(8)]


@pytest.mark.parametrize(
    ("gpus", "nics", "expected"),
    [
        (2, 2, [[0], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (2, 3, [[0], [1, 2]]),
        (4, 2, [[0], [0], [1], [1]]),
        (3, 1, [[0], [0], [0]]),
    ],
)
def test_a_guest_where_everything_is_equally_near(
    tmp_path: Path, gpus: int, nics: int, expected: list[list[int]]
) -> None:
    flat_guest(tmp_path, gpus, nics)
    assert by_index(read_topology(tmp_path)) == [[f"mlx5_{index}" for index in each] for each in expected]


def test_cascaded_switches_fewer_hops_are_nearer(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.cpus([(0, range(8))])
    port = tree.pci("pci0000:00", "0000:00:01.0", CLASS_BRIDGE, "0x8086", 0)
    outer = tree.switch(port, 0x10, 3, 0)
    for index, below in enumerate(outer[:2]):
        inner = tree.switch(below, 0x20 + 0x10 * index, 2, 0)
        tree.gpu(inner[0], f"0000:{0x50 + index:02x}:00.0", 0)
        tree.nic(inner[1], f"0000:{0x60 + index:02x}:00.0", f"mlx5_{index}", numa=0)
    tree.nic(outer[2], "0000:70:00.0", "mlx5_2", numa=0)
    assert by_index(read_topology(tmp_path)) == [["mlx5_0"], ["mlx5_1"]]


def test_slow_nics_are_left_out(tmp_path: Path) -> None:
    flat_guest(tmp_path, 1, 3, rates=["100 Gb/sec (4X EDR)", "25 Gb/sec (1X EDR)", "50 Gb/sec (2X EDR)"])
    assert by_index(read_topology(tmp_path)) == [["mlx5_0", "mlx5_2"]]


def test_no_rdma_at_all_means_the_configured_addresses(tmp_path: Path) -> None:
    plain_machine(tmp_path)
    (host,) = assign(read_topology(tmp_path), addresses=["127.0.0.1", "127.0.0.2"])
    assert (host.device, names(host), host.choice) == ("host", ["127.0.0.1", "127.0.0.2"], Choice.NO_RDMA)
    assert (host.gbps, host.distance, host.progress_cpu) == (0, None, 1)


def test_no_active_port_is_no_rdma(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=[f"mlx5_{index}" for index in range(8)])
    (tmp_path / "class/infiniband/mlx5_8/ports/1/state").write_text("1: DOWN\n")
    chosen = assign(read_topology(tmp_path), addresses=["10.0.0.1"])
    assert {tuple(names(group)) for group in chosen} == {("10.0.0.1",)}
    # The progress thread is near the GPU then.
    assert set(chosen[7].cpus) == {*range(32, 64), *range(96, 128)}


# --- containers with few CPUs -----------------------------------------------------------------------------------------


def test_a_cpuset_smaller_than_the_local_cpus(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    found = read_topology(tmp_path, allowed=[4, 5, 68, 40])
    assert found.allowed == (4, 5, 40, 68)
    chosen = groups(found)
    first, last = chosen[found.gpus[0].name], chosen[found.gpus[7].name]
    assert (first.cpus, last.cpus, last.progress_cpu) == ((4, 5, 68), (40,), 40)
    # The four of this socket share what there is, cores first.
    assert [chosen[gpu.name].progress_cpu for gpu in found.gpus[:4]] == [68, 5, 4, 5]


def test_a_cpuset_on_the_other_socket_only(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    found = read_topology(tmp_path, allowed=[32, 33])
    assert groups(found)[found.gpus[0].name].cpus == (32, 33)


def test_nics_of_two_sockets_have_the_cpus_of_both(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    found = read_topology(tmp_path, allowed=range(30, 34))
    host = groups(found)["host"]
    assert host.cpus == (30, 31, 32, 33)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_configuration_decides_where_it_speaks(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_5"])
    found = read_topology(tmp_path)
    override = {"0": ["mlx5_3", "mlx5_8"], found.gpus[1].name.upper(): ["mlx5_5"], "host": ["10.0.0.1"]}
    chosen = assign(found, override)
    assert [names(group) for group in chosen[:3]] == [["mlx5_3", "mlx5_8"], ["mlx5_5"], ["mlx5_2"]]
    assert [group.choice for group in chosen[:3]] == [Choice.CONFIGURED, Choice.CONFIGURED, Choice.NEAREST]
    assert chosen[0].distance is Distance.NUMA
    assert names(chosen[8]) == ["10.0.0.1"]


def test_a_star_is_everybody_else(tmp_path: Path) -> None:
    flat_guest(tmp_path, 2, 2)
    found = read_topology(tmp_path)
    assert by_index(found, override={"1": ["mlx5_0"], "*": ["127.0.0.1", "127.0.0.2"]}) == [
        ["127.0.0.1", "127.0.0.2"],
        ["mlx5_0"],
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"9": ["mlx5_0"]}, "no device '9'"),
        ({"0000:ff:00.0": ["mlx5_0"]}, "no device"),
        ({"0": ["mlx5_9"]}, "no RDMA device 'mlx5_9'"),
        ({"*": []}, "at least one"),
    ],
)
def test_overrides_of_what_is_not_there_are_refused(tmp_path: Path, override: dict[str, list[str]], says: str) -> None:
    flat_guest(tmp_path, 1, 1)
    with pytest.raises(FabricError, match=says) as refused:
        assign(read_topology(tmp_path), override)
    assert (refused.value.status, refused.value.reason) == ("INVALID_ARGUMENT", "BAD_DOMAINS")


@given(st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=30)
def test_every_gpu_has_a_nic_and_every_nic_is_used(gpus: int, nics: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        flat_guest(Path(directory), gpus, nics)
        chosen = by_index(read_topology(Path(directory)))
    assert all(chosen)
    used = [name for group in chosen for name in group]
    assert set(used) == {f"mlx5_{index}" for index in range(nics)}
    assert max(map(len, chosen)) - min(map(len, chosen)) <= 1
    uses = [used.count(f"mlx5_{index}") for index in range(nics)]
    assert max(uses) - min(uses) <= 1


# --- what an agent opens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "node", "expected"),
    [
        ("tcp", "127.0.0.1", ["127.0.0.1"]),
        ("auto", "10.0.0.2", ["10.0.0.2"]),
        ("verbs", "127.0.0.1", [f"mlx5_{number}" for number in range(8)]),
        ("efa", "localhost", [f"mlx5_{number}" for number in range(8)]),
        ("verbs", "10.0.0.2", ["10.0.0.2"]),
    ],
)
def test_an_agent_opens_the_nearest_devices_over_rdma_unless_an_address_chooses(
    tmp_path: Path, transport: str, node: str, expected: list[str]
) -> None:
    dual_socket(tmp_path)
    found = groups_of_agent(read_topology(tmp_path), transport, node)
    domains = Domains.of_groups(found)
    assert sorted(domains.names) == expected
    assert sorted(domains.host) == list(range(len(expected)))


def test_a_domain_has_one_number_whoever_it_serves(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    override = {"0": ["10.0.0.2", "10.0.1.2"], "1": ["10.0.1.2"], "host": ["10.0.2.2"]}
    domains = Domains.of_groups(groups_of_agent(read_topology(tmp_path), "tcp", "10.0.0.1", override))
    assert domains.names == ("10.0.0.2", "10.0.1.2", "10.0.0.1", "10.0.2.2")
    assert (domains.of_gpu("0000:13:00.0"), domains.of_gpu("0000:23:00.0")) == ((0, 1), (1,))
    assert domains.of_gpu("0000:33:00.0") == (2,)
    assert domains.of_gpu("0000:ff:00.0") == domains.host == (3,)
    assert domains.served_by(1) == ["0000:13:00.0", "0000:23:00.0"]
    assert domains.served_by(3) == ["host"]
