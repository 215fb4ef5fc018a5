"""Random fault schedules over a real transport with four agents: tests/fault_schedules.py says what each must end with.

python tests/bench/fault_schedules.py [--schedules 10000] [--seed 0] [--transport tcp] [--fleets 3]

Prints every seed that failed, and how to run it again; exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


import uvloop

from fault_schedules import HEAD_DIMS, draw, fleet

# A fleet is renewed from time to time, so that its start and its end are part of what is tried.
SCHEDULES_A_FLEET = 250


class Runs:
    def __init__(self, schedules: int, seed: int, transport: str, several: bool) -> None:
        self._transport = transport
        self._several = several
        seeds = range(seed, seed + schedules)
        # By the seed, so that a seed says everything.
        self._seeds: dict[int, Iterator[int]] = {
            head_dim: iter([each for each in seeds if each % len(HEAD_DIMS) == number])
            for number, head_dim in enumerate(HEAD_DIMS)
        }
        self._schedules = schedules
        self.done = 0
        self.outcomes: Counter[str] = Counter()
        self.failed: list[int] = []
        self._began = time.monotonic()

    async def fleets(self, number: int) -> None:
        """One fleet after the other, as long as there are seeds."""
        for turn in range(len(HEAD_DIMS)):
            head_dim = HEAD_DIMS[(number + turn) % len(HEAD_DIMS)]
            for seed in self._seeds[head_dim]:
                await self._fleet(seed, head_dim)

    async def _fleet(self, first: int, head_dim: int) -> None:
        seed = first
        following = itertools.islice(self._seeds[head_dim], SCHEDULES_A_FLEET - 1)
        try:
            async with fleet(self._transport, head_dim, self._several) as made:
                for seed in itertools.chain([first], following):
                    await made.run(draw(seed, self._several))
                    self.done += 1
                    if self.done % 500 == 0:
                        print(f"{self.done} of {self._schedules} after {self.seconds:.0f} s", flush=True)
                self.outcomes += made.outcomes
        except Exception:
            self.failed.append(seed)
            traceback.print_exc()
            again = f"--transport {self._transport} --seed {seed} --schedules 1" + " --several" * self._several
            print(f"FAILED: python {sys.argv[0]} {again}\n  {draw(seed, self._several)}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="tcp", help="tcp or local: what works between engines of one process")
    parser.add_argument("--several", action="store_true", help="agents of 1, 2 and 3 domains")
    parser.add_argument("--fleets", type=int, default=3, help="at the same time; each has its own agents")
    options = parser.parse_args()
    # Every fault has its log line.
    logging.basicConfig(level=logging.CRITICAL)
    runs = Runs(options.schedules, options.seed, options.transport, options.several)
    await asyncio.gather(*(runs.fleets(number) for number in range(min(options.fleets, options.schedules))))
    for how, count in sorted(runs.outcomes.items()):
        print(f"{count:8}  {how}")
    print(f"{runs.done} schedules in {runs.seconds:.0f} s, {len(runs.failed)} failed {runs.failed or ''}")
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
