"""Which process holds what."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from cluster import Cluster, make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")


def mapped_files(pid: int) -> set[str]:
    """Names of the files that a process has mapped: shared objects of what it imported among them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def inet_sockets(pid: int) -> list[str]:
    """Inodes of the process's own descriptors that the kernel lists as INET sockets."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    inet = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            inet.add(line.split()[9])
    return sorted(own & inet)


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_model_process_holds_no_network_code(disaggregated: Cluster, worker: str) -> None:
    process: psutil.Process = disaggregated.services[worker].model_process()
    assert inet_sockets(process.pid) == []
    maps = mapped_files(process.pid)
    assert any("torch" in name for name in maps), "it is the model process"
    assert not [name for name in maps if "/grpc/" in name or "libfabric" in name or "baton_fabric" in name]


@pytest.mark.parametrize("agent", ["agent-prefill-0", "agent-decode-0"])
async def test_agent_holds_the_fabric_and_no_torch(disaggregated: Cluster, agent: str) -> None:
    maps = mapped_files(disaggregated.services[agent].pid)
    assert any("libfabric" in name for name in maps)
    assert not [name for name in maps if "torch" in name]


async def test_gateway_holds_neither(disaggregated: Cluster) -> None:
    maps = mapped_files(disaggregated.services["gateway"].pid)
    assert not [name for name in maps if "torch" in name or "libfabric" in name]


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_worker_holds_neither_torch_nor_fabric(disaggregated: Cluster, worker: str) -> None:
    maps = mapped_files(disaggregated.services[worker].pid)
    assert not [name for name in maps if "torch" in name or "libfabric" in name]


async def test_clusters_answer_after_all_that(disaggregated: Cluster) -> None:
    assert len((await disaggregated.generate(make_prompt(20), max_tokens=2)).token_ids) == 2
