"""How much of a transfer hides behind the prefill: two agents, a real model, a prompt of 2,000 tokens in chunks of 512.

Prints when the first page landed against the end of the first chunk's second layer, and the time from the end of the
prompt's last layer to the full inbox against the time that the same bytes take alone (same pages, after the fact).

    python tests/bench/overlap.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
from pathlib import Path

from baton.v1 import agent_pb2

from baton_config.models import resolve_model
from baton_engine.client import EngineClient
from baton_engine.messages import EngineSpec, StepResult
from baton_engine.scheduler import Scheduler, Sequence
from baton_kv.plan import chunk_pages, expected_extents, pages_to_transfer
from baton_kv.shards import ShardMap
from baton_rpc.channel import open_channel
from baton_worker.agent_link import AgentLink
from baton_worker.agent_session import AgentSession

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Cluster

PROMPT_TOKENS = 2000
CHUNK_TOKENS = 512
PAGE_SIZE = 16


class Side:
    """A model process attached to an agent of its own."""

    def __init__(self, client: EngineClient, link: AgentLink, session: AgentSession) -> None:
        self.client = client
        self.link = link
        self.session = session

    @classmethod
    async def start(cls, socket: str, cpu: int, pages: int) -> Side:
        spec = EngineSpec(
            model_path=str(resolve_model("smollm2")), page_size=PAGE_SIZE, pages=pages, threads=1, cpus=(cpu,)
        )
        client = await EngineClient.start(spec)
        link = AgentLink([client], open_channel(socket), lambda: None)
        link.start()
        return cls(client, link, await link.session(30))

    async def stop(self) -> None:
        await self.client.stop()
        await self.link.stop()


async def transfer(
    source: Side, destination: Side, scheduler: Scheduler | None, sequence_id: int, prompt: list[int], step: int
) -> tuple[list[StepResult], agent_pb2.InboxFull, agent_pb2.TransferDone]:
    """Prefills and pushes layer by layer; without a scheduler only pushes what step `step` - 1 and before computed."""
    pages = list(range(pages_to_transfer(len(prompt), 0, PAGE_SIZE)))
    info = destination.client.info
    shards = ShardMap(info.kv_heads, 1)
    expected = expected_extents(
        shards, shards, info.order, prompt_tokens=len(prompt), prefix_tokens=0, page_size=PAGE_SIZE, layers=info.layers
    )
    inbox = await destination.session.open_inbox(source.session.descriptor, expected)
    outgoing = await source.session.open_transfer(inbox.descriptor, pages, pages)
    results = []
    if scheduler is None:
        plan = agent_pb2.ChunkPlan(transfer=outgoing.transfer, first_page=0, pages=len(pages), last=True)
        await source.session.submit_step(step - 1, [plan])
    else:
        scheduler.add(Sequence(sequence_id=sequence_id, token_ids=tuple(prompt), pages=tuple(pages), prefill_only=True))
        while (plan_of_step := scheduler.next_step()) is not None:
            item = plan_of_step.items[0]
            done = chunk_pages(len(prompt), 0, PAGE_SIZE, item.start, item.end)
            chunk = agent_pb2.ChunkPlan(
                transfer=outgoing.transfer,
                first_page=done.start,
                pages=len(done),
                last=item.end == len(prompt) - 1,
            )
            _, result = await asyncio.gather(
                source.session.submit_step(plan_of_step.step, [chunk]), source.client.step(plan_of_step)
            )
            results.append(result)
            scheduler.complete(result)
    full = await asyncio.wait_for(inbox.ended, 60)
    finished = await asyncio.wait_for(outgoing.ended, 60)
    assert isinstance(full, agent_pb2.InboxFull), full
    assert isinstance(finished, agent_pb2.TransferDone), finished
    await destination.session.close_inbox(inbox)
    return results, full, finished


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="tcp")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    rng = random.Random(3)
    cluster = Cluster(transport=options.transport)
    agents = {name: service for name, service in cluster.services.items() if name.startswith("agent-")}
    sockets = [service.environment["BATON_AGENT__SOCKET"] for service in agents.values()]
    cluster.services = agents
    for service in agents.values():
        service.start()
    shares, landed_first = [], True
    pages = pages_to_transfer(PROMPT_TOKENS, 0, PAGE_SIZE) + 1
    try:
        source = await Side.start(sockets[0], cpus[0], pages)
        destination = await Side.start(sockets[1], cpus[-1], pages)
        scheduler = Scheduler(chunk_tokens=CHUNK_TOKENS, max_batch=1, page_size=PAGE_SIZE)
        steps = 0
        for index in range(options.rounds + 1):
            prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
            results, full, done = await transfer(source, destination, scheduler, index, prompt, 0)
            steps += len(results)
            _, alone, _ = await transfer(source, destination, None, index, prompt, steps)
            if not index:
                continue
            first = (full.first_ns - results[0].layer_ends_ns[0]) / 1e6
            second_layer = (results[0].layer_ends_ns[1] - results[0].layer_ends_ns[0]) / 1e6
            exposed = (full.full_ns - results[-1].layer_ends_ns[-1]) / 1e6
            same_bytes = alone.duration_us / 1e3
            shares.append(exposed / same_bytes)
            landed_first = landed_first and first < second_layer
            print(
                f"first page {first:6.2f} ms after layer 1 (layer 2 done after {second_layer:6.2f} ms)   "
                f"last layer to full inbox {exposed:6.2f} ms   the bytes alone {same_bytes:7.2f} ms   "
                f"share {shares[-1] * 100:5.1f} %   {done.stats.bytes / 1e6:.1f} MB in {done.stats.writes} writes",
                flush=True,
            )
        await source.stop()
        await destination.stop()
    finally:
        await cluster.stop()
    share = statistics.median(shares)
    print(f"median share {share * 100:.1f} % (bar: at most 10 %); first page before the second layer: {landed_first}")
    return 0 if share <= 0.1 and landed_first else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
