"""The choice of a GID, from a tree as the kernel shows it."""

from pathlib import Path

import pytest

from baton_agent.roce import RoceNotConfigurable, choose, gids_of

GIDS = {
    0: ("fe80:0000:0000:0000:846f:d5ff:feb8:1ff8", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:846f:d5ff:feb8:1ff8", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2"),
    4: ("0000:0000:0000:0000:0000:0000:0000:0000", None),
}


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """sysfs and configfs of one device; a port's options exist already, as if asked for."""
    devices, defaults = tmp_path / "devices", tmp_path / "defaults"
    port = devices / "mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    for index, (gid, kind) in GIDS.items():
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
    options = defaults / "mlx5_0/ports/1"
    options.mkdir(parents=True)
    (options / "default_roce_mode").write_text("RoCE v2\n")
    (options / "default_roce_tos").write_text("0\n")
    return devices, defaults


def test_an_address_has_a_gid_of_each_version(trees: tuple[Path, Path]) -> None:
    devices, _ = trees
    assert [gid.index for gid in gids_of("mlx5_0", "10.77.0.1", devices)] == [2, 3]
    assert [gid.index for gid in gids_of("mlx5_0", "fe80::846f:d5ff:feb8:1ff8", devices)] == [0, 1]
    # Unused entries are no one's.
    assert gids_of("mlx5_0", "::", devices) == []


@pytest.mark.parametrize(("version", "index"), [("v1", 2), ("v2", 3), (None, 3)])
def test_version_and_traffic_class_become_the_ports_defaults(
    trees: tuple[Path, Path], version: str | None, index: int
) -> None:
    devices, defaults = trees
    gid = choose("mlx5_0", "10.77.0.1", version, 106, devices, defaults)
    assert gid is not None
    assert gid.index == index
    assert str(gid) == f"GID {index} of mlx5_0 port 1, ::ffff:a4d:1 ({gid.kind})"
    options = defaults / "mlx5_0/ports/1"
    assert (options / "default_roce_mode").read_text().strip() == gid.kind
    assert (options / "default_roce_tos").read_text() == "106"


def test_nothing_given_changes_nothing(trees: tuple[Path, Path]) -> None:
    devices, defaults = trees
    (defaults / "mlx5_0/ports/1/default_roce_mode").write_text("IB/RoCE v1\n")
    for tree, index in ((defaults, 2), (defaults / "absent", 3)):
        gid = choose("mlx5_0", "10.77.0.1", devices=devices, defaults=tree)
        assert gid is not None
        assert gid.index == index
    assert (defaults / "mlx5_0/ports/1/default_roce_tos").read_text() == "0\n"


def test_what_cannot_be_chosen_is_said(trees: tuple[Path, Path]) -> None:
    devices, defaults = trees
    with pytest.raises(RoceNotConfigurable) as caught:
        choose("mlx5_0", "10.99.0.1", devices=devices, defaults=defaults)
    assert caught.value.fields == {"device": "mlx5_0", "node": "10.99.0.1"}
    with pytest.raises(RoceNotConfigurable) as caught:
        choose("mlx5_0", "10.77.0.1", traffic_class=106, devices=devices, defaults=defaults / "absent")
    assert caught.value.fields["option"] == "default_roce_tos"
    with pytest.raises(RoceNotConfigurable):
        choose("mlx5_0", "node7", devices=devices, defaults=defaults)


def test_infiniband_has_no_gid_by_address(trees: tuple[Path, Path]) -> None:
    devices, defaults = trees
    (devices / "mlx5_0/ports/1/link_layer").write_text("InfiniBand\n")
    assert choose("mlx5_0", "10.88.0.1", devices=devices, defaults=defaults) is None
    with pytest.raises(RoceNotConfigurable):
        choose("mlx5_0", "10.88.0.1", version="v2", devices=devices, defaults=defaults)
