"""Services without work, to test what starts and ends them: ``stub_service.py COMMAND --config FILE --parent PID``.

A model named "crash" makes workers end at their start. ``stub_service.py up DIRECTORY`` runs a cluster until a signal.
"""

import argparse
import asyncio
import itertools
import os
import sys
from pathlib import Path

from baton.v1 import (
    agent_pb2_grpc,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

from baton_actors import hold_stop_signals, serve_until_signalled
from baton_cli.cluster import Cluster
from baton_cli.parent import end_with_parent
from baton_cli.plan import plan_cluster, ports_needed
from baton_cli.ports import free_ports
from baton_config import Settings, load_settings
from baton_rpc import RpcServer, open_channel

PROGRAM = (sys.executable, __file__)


class Registry(registry_pb2_grpc.RegistryServicer):
    def __init__(self):
        self.workers = {}

    async def Register(self, request, context):
        self.workers[request.worker.worker_id] = request.worker
        return registry_pb2.RegisterResponse(lease=1, ttl_ms=1000)

    async def List(self, request, context):
        return registry_pb2.ListResponse(workers=self.workers.values())


class Inference(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):
        words = request.chat.messages[-1].content if request.HasField("chat") else request.text
        for word in words.split():
            yield inference_pb2.GenerateResponse(text=word.upper() + " ")
        last = inference_pb2.GenerateResponse(finish_reason=1, request_id="r-1")
        last.usage.prompt_tokens, last.usage.completion_tokens = 7, 2
        last.timeline.time_to_first_token_us = 1234
        yield last


async def gateway(settings):
    server = RpcServer([settings.gateway.grpc, settings.gateway.registry])
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, Registry(), "baton.v1.Registry")
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Inference(), "baton.v1.Inference")
    await server.start()
    await serve_until_signalled()
    await server.stop(0)


async def worker(settings, options, register, servicer, name):
    if settings.model.name == "crash":
        sys.exit("the weights are missing")
    server = RpcServer([options.listen])
    server.add(register, servicer, name)
    await server.start()
    async with open_channel(settings.registry_target) as channel:
        request = registry_pb2.RegisterRequest(worker=registry_pb2.WorkerInfo(worker_id=options.worker_id))
        await registry_pb2_grpc.RegistryStub(channel).Register(request, wait_for_ready=True, timeout=30)
    print(f"registered, on CPUs {options.cpus}", flush=True)
    await serve_until_signalled()
    await server.stop(0)


async def agent(settings):
    server = RpcServer([settings.agent.socket])
    server.add(agent_pb2_grpc.add_TransferAgentServicer_to_server, agent_pb2_grpc.TransferAgentServicer(), "agent")
    await server.start()
    await serve_until_signalled()
    await server.stop(0)


def serve(command: str, settings: Settings):
    if command == "gateway":
        return gateway(settings)
    if command == "transfer-agent":
        return agent(settings)
    if command == "prefill-worker":
        register, servicer = prefill_pb2_grpc.add_PrefillServicer_to_server, prefill_pb2_grpc.PrefillServicer()
        return worker(settings, settings.prefill, register, servicer, "baton.v1.Prefill")
    register, servicer = decode_pb2_grpc.add_DecodeServicer_to_server, decode_pb2_grpc.DecodeServicer()
    return worker(settings, settings.decode, register, servicer, "baton.v1.Decode")


def make_cluster(settings: Settings, directory: Path, on_state=lambda *_: None) -> Cluster:
    ports = itertools.chain(free_ports(2 + ports_needed(settings)))
    addresses = {name: f"127.0.0.1:{next(ports)}" for name in ("http", "grpc")}
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=addresses)})
    return Cluster(plan_cluster(settings, directory, ports, [0, 1]), directory, on_state, PROGRAM)


async def up(directory: Path):
    cluster = make_cluster(Settings(), directory)
    try:
        await cluster.start()
        hold_stop_signals()  # whoever reads this may send one at once
        print("ready", flush=True)
        await serve_until_signalled(cluster.join())
    finally:
        await cluster.stop()


def main():
    if sys.argv[1] == "up":
        asyncio.run(up(Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid())
    arguments = parser.parse_args()
    end_with_parent(arguments.parent, 5)
    asyncio.run(serve(arguments.command, load_settings(file=arguments.config)))


if __name__ == "__main__":
    main()
