"""Paged writes through the native engine against a bare libfabric loop with the same window, provider, pages and pools.

Two processes each, on loopback; engine and bare loop take turns. Both block on their queues where those are empty.

    python tests/bench/fabric.py [--rounds 7] [--mib 256] [--provider tcp]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from engine_pair import EnginePair
from line_processes import LinePair, Run, bare_pair
from pages import Pages, scattered

NODE = "127.0.0.1"
KIB = 1 << 10
MIB = 1 << 20


def rates(runs: list[Run], amount: float) -> float:
    """Median of amount a second."""
    return statistics.median(amount / run.seconds for run in runs)


def compare(engine: EnginePair, bare: LinePair, pages: Pages, rounds: int) -> tuple[list[Run], list[Run]]:
    """By turns; the first round of each touches the memory."""
    writes, length = pages.writes(), pages.run * pages.page_bytes
    ours: list[Run] = []
    theirs: list[Run] = []
    for number in range(rounds + 1):
        pair = engine.run(pages), bare.run(length, writes, wait=True)
        if number:
            ours.append(pair[0])
            theirs.append(pair[1])
    label = f"{pages.page_bytes // KIB} KiB x {pages.run}"
    for name, runs in (("engine", ours), ("bare", theirs)):
        gigabytes = [pages.bytes / run.seconds / 1e9 for run in runs]
        cpu = sum(run.cpu for run in runs) / (pages.bytes * len(runs) / 1e9)
        print(
            f"  {label:12s} {name:7s} {statistics.median(gigabytes):6.2f} GB/s ({min(gigabytes):.2f} to"
            f" {max(gigabytes):.2f}), {rates(runs, pages.extents) / 1e3:7.1f} k extents/s, {cpu:.3f} CPU s/GB",
            flush=True,
        )
    return ours, theirs


def ratio(pages: Pages, runs: tuple[list[Run], list[Run]]) -> float:
    return rates(runs[0], pages.bytes) / rates(runs[1], pages.bytes)


def cpu_ratio(runs: tuple[list[Run], list[Run]]) -> float:
    ours, theirs = (statistics.median(run.cpu for run in side) for side in runs)
    return ours / theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="bytes a round")
    parser.add_argument("--provider", default="tcp")
    options = parser.parse_args()
    report = Report()
    total = options.mib * MIB
    pool = 2 * total
    large = scattered(64 * KIB, total, pool)
    joined = scattered(12 * KIB, total, pool, run=32)
    apart = scattered(12 * KIB, total, pool)
    small = scattered(4 * KIB, total, pool)
    with closing(EnginePair(options.provider, pool)) as engine:
        print(f"provider {engine.provider}, window {engine.window}, {options.mib} MiB a round, {options.rounds} rounds")
        with bare_pair(engine.provider, NODE, engine.window, engine.source, engine.destination) as bare:
            of_large = compare(engine, bare, large, options.rounds)
            report.at_least("64 KiB pages scattered, of the bare loop", ratio(large, of_large), 0.95)
            report.at_most("  CPU a GB, of the bare loop's", cpu_ratio(of_large), 1.1)
            of_joined = compare(engine, bare, joined, options.rounds)
            report.at_least("12 KiB pages in runs of 32, of the bare loop at 384 KiB", ratio(joined, of_joined), 0.95)
            report.at_most("  CPU a GB, of the bare loop's", cpu_ratio(of_joined), 1.1)
            of_apart = compare(engine, bare, apart, options.rounds)
            gain = rates(of_joined[0], joined.bytes) / rates(of_apart[0], apart.bytes)
            report.at_least("12 KiB pages in runs of 32, of the same pages scattered", gain, 1.8)
            of_small = compare(engine, bare, small, options.rounds)
            report.at_least("4 KiB pages scattered, of the bare loop", ratio(small, of_small), 0.9)
            report.at_most("  CPU a GB, of the bare loop's", cpu_ratio(of_small), 1.1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
