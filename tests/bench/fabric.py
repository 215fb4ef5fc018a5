"""Paged writes through the native engine against a bare libfabric loop with the same window, provider, pages and pools.

Two processes each, over loopback, half of the cores a side; engine and bare loop take turns, round by round, in several
fresh pairs of processes. Both block on their queues where those are empty.

    python tests/bench/fabric.py [--pairs 3] [--rounds 7] [--mib 256] [--provider tcp]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from engine_pair import EnginePair
from line_processes import LinePair, Run, bare_pair
from loopback import own_loopback
from pages import Pages, scattered

NODE = "127.0.0.1"
KIB = 1 << 10
MIB = 1 << 20


def rates(runs: list[Run], amount: float) -> float:
    """Median of amount a second."""
    return statistics.median(amount / run.seconds for run in runs)


@dataclass
class Sides:
    """The runs of both over the same pages, in the order in which they were made."""

    pages: Pages
    engine: list[Run] = field(default_factory=list)
    bare: list[Run] = field(default_factory=list)

    def take_turns(self, engine: EnginePair, bare: LinePair, rounds: int) -> None:
        """The first round of each touches the memory."""
        writes, length = self.pages.writes(), self.pages.run * self.pages.page_bytes
        for number in range(rounds + 1):
            pair = engine.run(self.pages), bare.run(length, writes, wait=True)
            if number:
                self.engine.append(pair[0])
                self.bare.append(pair[1])

    def show(self) -> None:
        label = f"{self.pages.page_bytes // KIB} KiB x {self.pages.run}"
        for name, runs in (("engine", self.engine), ("bare", self.bare)):
            gigabytes = [self.pages.bytes / run.seconds / 1e9 for run in runs]
            cpu = sum(run.cpu for run in runs) / (self.pages.bytes * len(runs) / 1e9)
            print(
                f"  {label:12s} {name:7s} {statistics.median(gigabytes):6.2f} GB/s ({min(gigabytes):.2f} to"
                f" {max(gigabytes):.2f}), {rates(runs, self.pages.extents) / 1e3:7.1f} k extents/s, {cpu:.3f} CPU s/GB",
                flush=True,
            )

    def ratio(self) -> float:
        return rates(self.engine, self.pages.bytes) / rates(self.bare, self.pages.bytes)

    def cpu_ratio(self) -> float:
        ours, theirs = (statistics.median(run.cpu for run in side) for side in (self.engine, self.bare))
        return ours / theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="fresh processes of either, one pair after the other")
    parser.add_argument("--rounds", type=int, default=7, help="of each pair, for each kind of pages")
    parser.add_argument("--mib", type=int, default=256, help="bytes a round")
    parser.add_argument("--provider", default="tcp")
    options = parser.parse_args()
    report = Report()
    network = own_loopback()
    total = options.mib * MIB
    pool = 2 * total
    large = Sides(scattered(64 * KIB, total, pool))
    joined = Sides(scattered(12 * KIB, total, pool, run=32))
    apart = Sides(scattered(12 * KIB, total, pool))
    small = Sides(scattered(4 * KIB, total, pool))
    kinds = large, joined, apart, small
    for number in range(options.pairs):
        with closing(EnginePair(options.provider, pool)) as engine:
            if number == 0:
                print(f"{network}; provider {engine.provider}, window {engine.window}, {options.mib} MiB a round,")
                print(f"{options.rounds} rounds in each of {options.pairs} pairs of processes")
            with bare_pair(engine.provider, NODE, engine.window, engine.source, engine.destination) as bare:
                for sides in kinds:
                    sides.take_turns(engine, bare, options.rounds)
    for sides in kinds:
        sides.show()
    report.at_least("64 KiB pages scattered, of the bare loop", large.ratio(), 0.95)
    report.at_most("  CPU a GB, of the bare loop's", large.cpu_ratio(), 1.1)
    report.at_least("12 KiB pages in runs of 32, of the bare loop at 384 KiB", joined.ratio(), 0.95)
    report.at_most("  CPU a GB, of the bare loop's", joined.cpu_ratio(), 1.1)
    gain = rates(joined.engine, joined.pages.bytes) / rates(apart.engine, apart.pages.bytes)
    report.at_least("12 KiB pages in runs of 32, of the same pages scattered", gain, 1.8)
    report.at_least("4 KiB pages scattered, of the bare loop", small.ratio(), 0.9)
    report.at_most("  CPU a GB, of the bare loop's", small.cpu_ratio(), 1.1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
