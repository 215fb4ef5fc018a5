"""`baton topology` on made trees, and on this machine."""

import asyncio
import tempfile
from pathlib import Path

from typer.testing import CliRunner, Result

import fake_fabric
from baton_agent.service import Addresses, TransferAgentService
from baton_cli.main import app
from baton_fabric.errors import FabricError
from sysfs_trees import dual_socket, plain_machine


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["topology", *arguments], env={"COLUMNS": "200"})


def rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("\u2502")] for line in output.splitlines() if "\u2502" in line]


def test_a_server_with_eight_gpus(tmp_path: Path) -> None:
    dual_socket(tmp_path, down=["mlx5_2"])
    result = run("--sysfs", str(tmp_path), "--set", "agent.domains=0=mlx5_4+mlx5_5", "--set", "agent.transport=verbs")
    assert result.exit_code == 0, result.output
    found = rows(result.output)
    assert ["GPU 7", "0000:83:00.0", "1", "NVIDIA", "", ""] in found
    assert ["mlx5_0", "0000:14:00.0", "0", "Mellanox", "400 Gb/s InfiniBand", "ibp20s0"] in found
    assert ["mlx5_2", "0000:34:00.0", "0", "Mellanox", "port 1 DOWN", "ibp52s0"] in found
    assert ["eno2", "0000:00:1f.0", "0", "down"] in found
    assert [row[:5] for row in found if row[0] in ("0000:13:00.0", "0000:33:00.0", "0000:43:00.0")] == [
        ["0000:13:00.0", "mlx5_4, mlx5_5", "configured", "system", "800"],
        ["0000:33:00.0", "mlx5_0", "nearest", "numa", "400"],
        ["0000:43:00.0", "mlx5_3", "nearest", "switch", "400"],
    ]
    assert "CPUs: 0-127 of 0-127 may be used; NUMA node 0 (socket 0): 0-31,64-95; NUMA node 1" in result.output


def test_a_machine_without_any(tmp_path: Path) -> None:
    plain_machine(tmp_path)
    result = run("--sysfs", str(tmp_path), "--set", "agent.node=10.0.0.2")
    assert result.exit_code == 0, result.output
    assert ["host", "10.0.0.2", "agent.node", "", "", "0-1, best 1"] in rows(result.output)
    assert "GPUs" not in result.output


def test_a_domain_that_is_not_there(tmp_path: Path) -> None:
    plain_machine(tmp_path)
    result = run("--sysfs", str(tmp_path), "--set", "agent.domains=mlx5_0")
    assert isinstance(result.exception, FabricError)
    assert "no RDMA device" in str(result.exception)


def test_over_tcp_the_rdma_devices_are_of_no_importance(tmp_path: Path) -> None:
    dual_socket(tmp_path)
    result = run("--sysfs", str(tmp_path), "--set", "agent.domains=host=10.0.0.3+10.0.0.4")
    found = {row[0]: row[1:3] for row in rows(result.output) if row[2] in ("agent.node", "configured")}
    assert found["host"] == ["10.0.0.3, 10.0.0.4", "configured"]
    assert found["0000:13:00.0"] == ["127.0.0.1", "agent.node"]


def test_this_machine(tmp_path: Path) -> None:
    result = run("--set", f"agent.socket=unix:{tmp_path}/nobody")
    assert result.exit_code == 0, result.output
    assert "running agent" not in result.output
    assert "No agent answers at unix:" in result.output


async def test_what_the_running_agent_has_open() -> None:
    with tempfile.TemporaryDirectory(prefix="bt-") as path:
        addresses = Addresses(f"unix:{path}/a", f"{path}/h", "127.0.0.1:0")
        service = TransferAgentService(fake_fabric.Engine(fake_fabric.Network()), "fake", "node", addresses)
        await service.start()
        try:
            result = await asyncio.to_thread(run, "--set", f"agent.socket={addresses.socket}")
        finally:
            await service.stop()
    assert result.exit_code == 0, result.output
    expected = ["127.0.0.1", "fake", "fake0, 127.0.0.1", "host", "0 B", "0", "0"]
    assert expected in rows(result.output), result.output
