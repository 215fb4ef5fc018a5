"""The next turn of a chat with and without the prefix cache, in pairs A B A B.

A: a long prompt, its answer and a short question on top of it, after the turn before was served. B: the same tokens,
sharing with nobody. Prints time to first token and what crossed the fabric. Expected: A is at least 4 times as fast.

    python tests/bench/prefix.py [--pairs 5]
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Answer, Cluster, running_cluster

FIRST_TOKENS = 1500
ANSWER_TOKENS = 32
QUESTION_TOKENS = 40
BAR = 4.0


async def ask(cluster: Cluster, prompt: list[int], salt: str | None, max_tokens: int) -> tuple[float, Answer]:
    """Seconds to the first token, and the answer."""
    began = time.monotonic()
    answer = await cluster.generate(prompt, max_tokens=max_tokens, cache_salt=salt, timeout=600)
    return answer.token_times[0] - began, answer


def moved(answer: Answer) -> str:
    assert answer.timeline is not None and answer.usage is not None
    return f"{answer.timeline.transfer.bytes / 1e6:6.1f} MB, {answer.usage.cached_tokens:5d} tokens cached"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    rng = random.Random(5)
    ratios = []
    async with running_cluster(cpus={"prefill-0": str(cpus[0]), "decode-0": str(cpus[-1])}) as cluster:
        for index in range(options.pairs + 1):
            prompt = [rng.randrange(1000, 40_000) for _ in range(FIRST_TOKENS)]
            _, first = await ask(cluster, prompt, "chat", ANSWER_TOKENS)
            question = [rng.randrange(1000, 40_000) for _ in range(QUESTION_TOKENS)]
            turn = [*prompt, *first.token_ids, *question]
            cached, with_cache = await ask(cluster, turn, "chat", 4)
            alone, without = await ask(cluster, turn, None, 4)
            assert with_cache.token_ids == without.token_ids
            if index:  # the first pair warms up
                ratios.append(alone / cached)
                print(
                    f"with {cached * 1e3:8.1f} ms ({moved(with_cache)})   without {alone * 1e3:8.1f} ms "
                    f"({moved(without)})   {alone / cached:5.1f} times",
                    flush=True,
                )
    ratio = statistics.median(ratios)
    print(f"median {ratio:.1f} times as fast (bar: at least {BAR:g})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
