"""A prefill worker that computes nothing: a test ends each call, or `script` says how they end, one after another."""

import asyncio
import os
from typing import Any

from baton.v1 import agent_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2

from baton_rpc import RpcServer
from conditions import until
from fake_agent import FakeAgent, Refusal


class Run:
    """One call; `answer` takes a RunResponse or an exception."""

    def __init__(self, request: prefill_pb2.RunRequest, time_left: float | None = None) -> None:
        """`time_left`: seconds until the caller's deadline."""
        self.request = request
        self.time_left = time_left
        self.answer: asyncio.Future[prefill_pb2.RunResponse] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    @property
    def key(self) -> tuple[int, int]:
        """Of the receiver's inbox."""
        return self.request.inbox.slot, self.request.inbox.generation

    def succeed(self, **response: Any) -> None:
        self.answer.set_result(prefill_pb2.RunResponse(**response))

    def fail(self, status: str, reason: str = "TEST") -> None:
        self.answer.set_exception(Refusal(status, reason))


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, name: str, receiver: FakeAgent) -> None:
        """`receiver`: the decode worker's agent, whose inboxes a script fills."""
        self.name = name
        self.receiver = receiver
        self.target = f"unix:{os.path.join(receiver.directory, name)}.sock"
        self.runs: list[Run] = []
        self.script: list[str] = []
        self._server: RpcServer | None = None

    async def start(self) -> "FakePrefill":
        self._server = RpcServer([self.target])
        self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self, "baton.v1.Prefill")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def info(self, layout: Any, fingerprint: str = "f00d") -> registry_pb2.WorkerInfo:
        return registry_pb2.WorkerInfo(
            worker_id=self.name,
            role=registry_pb2.WORKER_ROLE_PREFILL,
            address=self.target,
            model=registry_pb2.ModelInfo(fingerprint=fingerprint),
            layout=layout,
            agent=agent_descriptor(self.name),
        )

    async def run(self, number: int = 0) -> Run:
        await until(lambda: len(self.runs) > number, f"call {number} of {self.name}")
        return self.runs[number]

    async def Run(self, request, context):
        run = Run(request, context.time_remaining())
        self.runs.append(run)
        step = self.script.pop(0) if self.script else ""
        if step == "fill":
            if run.key in self.receiver.inboxes:
                self.receiver.fill(run.key)
            run.succeed(queue_us=3)
        elif step:
            # "STATUS" or "STATUS REASON".
            run.fail(*step.split())
        try:
            return await run.answer
        except asyncio.CancelledError:
            run.cancelled = True
            raise


def agent_descriptor(name: str) -> Any:
    descriptor = agent_pb2.OpenInboxRequest().sender
    descriptor.version, descriptor.incarnation, descriptor.control_address = 1, hash(name) % 2**32, "127.0.0.1:3"
    return descriptor
