"""Time that the agent spends in Python on one plan of 2,048 pages: opening the transfer and submitting its step.

The sending agent is in this process and is asked as its gRPC server asks it; its receiver is an agent of its own. What
counts is the CPU time of the thread that runs the event loop, which holds the interpreter all that time.

    python tests/bench/plan_time.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from baton.v1 import agent_pb2

from baton_fabric.engine import FabricEngine
from baton_memory import SharedMemory

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report

from agent_kit import Model, Worker, layout, worker
from agent_processes import Agent
from baton_agent.service import Addresses, TransferAgentService
from baton_agent.servicers import TransferAgentServicer
from baton_kv.layout import PageLayout

PAGES = 2048
LAYERS = (1, 30, 60)


class Cost(NamedTuple):
    """Milliseconds of the event loop's thread."""

    opening: float
    submitting: float

    @property
    def both(self) -> float:
        return self.opening + self.submitting


@asynccontextmanager
async def attached(target: str, layers: int) -> AsyncIterator[tuple[Worker, Model]]:
    model = Model()
    model.memory.close()
    shape = {"layers": layers, "pages": PAGES}
    offered = layout(**shape)
    one = PageLayout(
        *(offered[name] for name in ("order", "layers", "pages", "page_size", "kv_heads", "head_dim", "element_size"))
    )
    model.memory = SharedMemory.create("kv", one.region_bytes)
    async with worker(target) as made:
        await made.describe()
        await model.attach(made.handoff_path, made.session, **shape)
        made.follow()
        await made.event("session_ready")
        yield made, model
        model.close()


async def one_plan(
    agent: TransferAgentServicer, sender: Worker, receiver: Worker, model: Model, layers: int, step: int
) -> Cost:
    chance = random.Random(step)
    inbox = await receiver.open_inbox(sender.agent, layers * PAGES)
    opening = agent_pb2.OpenTransferRequest(
        session=sender.session,
        inbox=inbox,
        source_pages=chance.sample(range(PAGES), PAGES),
        destination_pages=chance.sample(range(PAGES), PAGES),
    )
    context: Any = None  # neither method looks at it
    begin = time.thread_time_ns()
    transfer = (await agent.OpenTransfer(opening, context)).transfer
    opened = time.thread_time_ns()
    chunk = agent_pb2.ChunkPlan(transfer=transfer, first_page=0, pages=PAGES, last=True)
    await agent.SubmitStep(agent_pb2.SubmitStepRequest(session=sender.session, step=step, chunks=[chunk]), context)
    end = time.thread_time_ns()
    model.counter.advance((step + 1) * layers)
    await sender.event("transfer_done", lambda done: done.transfer == transfer)
    await receiver.close_inbox(inbox)
    return Cost((opened - begin) / 1e6, (end - opened) / 1e6)


async def costs(layers: int, rounds: int) -> list[Cost]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        decode = Agent(directory, "agent", "tcp")
        stack.callback(decode.stop)
        engine = await FabricEngine.start("tcp")
        addresses = Addresses(f"unix:{directory}/p.sock", f"{directory}/p.ho", "127.0.0.1:0")
        service = TransferAgentService(engine, engine.provider, "127.0.0.1", addresses)
        await service.start()
        stack.push_async_callback(service.stop)
        sender, model = await stack.enter_async_context(attached(addresses.socket, layers))
        receiver, _ = await stack.enter_async_context(attached(decode.target, layers))
        agent = TransferAgentServicer(
            service.descriptor,
            addresses.handoff,
            service.describe_domains,
            service.sessions,
            service.sender,
            service.receiver,
            service.metrics,
        )
        measured = [await one_plan(agent, sender, receiver, model, layers, step) for step in range(rounds + 3)]
        return measured[3:]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds: int = parser.parse_args().rounds
    report = Report()
    medians = {}
    for layers in LAYERS:
        measured = await costs(layers, rounds)
        medians[layers] = statistics.median(cost.both for cost in measured)
        opening, submitting = (statistics.median(part) for part in zip(*measured, strict=True))
        print(f"  {PAGES} pages x {layers:2d} layers: opening {opening:.3f} ms, submitting {submitting:.3f} ms")
    report.at_most(f"one plan of {PAGES} pages x 30 layers, in Python", medians[30], 2.0, "ms")
    # Independent of layers, but for noise.
    report.at_most(f"  60 layers, of 30 ({PAGES} pages)", medians[60] / medians[30], 1.25)
    return report.finish()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
