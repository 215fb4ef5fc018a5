"""Time to first token through the cluster against the prefill alone, in pairs A B A B.

A: a prompt of 1,024 tokens through gateway, decode worker, prefill worker and both agents. B: the same prompt's prefill
(all tokens but the last, same chunks, same core) in a model process of its own, while the cluster is idle. Expected:
A - B is at most one decode step and 15 ms.

    python tests/bench/ttft.py [--pairs 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path

from baton_config.models import resolve_model
from baton_engine.client import EngineClient
from baton_engine.messages import EngineSpec
from baton_engine.scheduler import Finished, Scheduler, Sequence

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import running_cluster

PROMPT_TOKENS = 1024
CHUNK_TOKENS = 512
PAGE_SIZE = 16
ALLOWANCE_S = 0.015


async def prefill_alone(client: EngineClient, scheduler: Scheduler, sequence_id: int, prompt: list[int]) -> float:
    """Seconds for the prompt's prefill, step messages included."""
    pages = tuple(range(-(-len(prompt) // PAGE_SIZE)))
    began = time.monotonic()
    scheduler.add(Sequence(sequence_id=sequence_id, token_ids=tuple(prompt), pages=pages, prefill_only=True))
    while True:
        plan = scheduler.next_step()
        assert plan is not None
        updates = scheduler.complete(await client.step(plan))
        if any(isinstance(update, Finished) for update in updates):
            return time.monotonic() - began


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    cpus = sorted(os.sched_getaffinity(0))
    rng = random.Random(7)
    spec = EngineSpec(
        model_path=str(resolve_model("smollm2")), page_size=PAGE_SIZE, pages=80, threads=1, cpus=(cpus[0],)
    )
    rows = []
    async with running_cluster(cpus={"prefill-0": str(cpus[0]), "decode-0": str(cpus[-1])}) as cluster:
        client = await EngineClient.start(spec)
        scheduler = Scheduler(chunk_tokens=CHUNK_TOKENS, max_batch=1, page_size=PAGE_SIZE)
        try:
            for index in range(pairs + 1):
                prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
                began = time.monotonic()
                answer = await cluster.generate(prompt, max_tokens=8)
                through = answer.token_times[0] - began
                alone = await prefill_alone(client, scheduler, index, prompt)
                assert answer.timeline is not None
                step = statistics.median(
                    later - earlier for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
                )
                if index:  # the first pair warms up
                    rows.append((through, alone, step))
                    print(
                        f"through {through * 1e3:8.1f} ms   alone {alone * 1e3:8.1f} ms   "
                        f"difference {(through - alone) * 1e3:7.1f} ms   decode step {step * 1e3:6.1f} ms   "
                        f"exposed transfer {answer.timeline.transfer.exposed_us / 1e3:6.2f} ms",
                        flush=True,
                    )
        finally:
            await client.stop()
    difference = statistics.median(through - alone for through, alone, _ in rows)
    step = statistics.median(step for _, _, step in rows)
    allowed = step + ALLOWANCE_S
    print(f"median difference {difference * 1e3:.1f} ms; allowed: {allowed * 1e3:.1f} ms (a decode step and 15 ms)")
    return 0 if difference <= allowed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
