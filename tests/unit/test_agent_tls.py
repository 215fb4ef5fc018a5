"""Agents that talk over mutual TLS, and a stranger who doesn't. Over fake engines."""

import asyncio
import shutil
import subprocess

import grpc
import pytest
from baton.v1 import agent_pb2, agent_pb2_grpc

import fake_fabric
from agent_kit import LAYERS, Model, extents, worker
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_rpc import TlsFiles, open_channel
from conditions import until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """One certificate that is its own authority, for 127.0.0.1."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=agent"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return TlsFiles(certificate, key, certificate)


async def test_transfers_and_their_ends_go_over_mutual_tls(tmp_path, tls):
    network = fake_fabric.Network()
    services = []
    for name in ("p", "d"):
        addresses = Addresses(f"unix:{tmp_path}/{name}", f"{tmp_path}/{name}h", "127.0.0.1:0")
        service = TransferAgentService(fake_fabric.Engine(network), "fake", "node", addresses, AgentOptions(), tls=tls)
        await service.start()
        services.append(service)
    source, target = Model(), Model()
    async with worker(f"unix:{tmp_path}/p", source) as sender, worker(f"unix:{tmp_path}/d", target) as receiver:
        inbox = await receiver.open_inbox(sender.agent, extents(1))
        transfer = await sender.open_transfer(inbox, [0], [0])
        source.counter.advance(LAYERS)
        await sender.submit(0, (transfer, 0, 1, True))
        network.run()
        await receiver.event("inbox_full")
        inbox = await receiver.open_inbox(sender.agent, extents(1))
        await sender.open_transfer(inbox, [0], [0])
        assert await receiver.close_inbox(inbox) == agent_pb2.INBOX_OUTCOME_QUIESCED
        async with open_channel(sender.agent.control_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await agent_pb2_grpc.TransferPeerStub(channel).Heartbeat(
                    agent_pb2.HeartbeatRequest(callee_incarnation=sender.agent.incarnation), timeout=5
                )
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.gather(*(service.stop() for service in services))
    await until(lambda: not (tmp_path / "p").exists())
    source.close()
    target.close()
