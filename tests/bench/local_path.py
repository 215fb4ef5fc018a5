"""The local transport against a memcpy loop over the same memory: pages scattered at random, between two processes.

By turns; from the call that submits a transfer until its inbox is full. With --against, other transports, too.

    python tests/bench/local_path.py [--rounds 5] [--mib 128] [--against shm,tcp]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from engine_pair import EnginePair
from line_processes import LineProcess, Run, copier
from pages import Pages, scattered

KIB = 1 << 10
MIB = 1 << 20
OF_MEMCPY = 0.85


def copied(copy: LineProcess, pages: Pages) -> Run:
    copy.load(pages.run * pages.page_bytes, pages.writes())
    return Run(copy.span("copy"), 0.0)


def measure(engines: dict[str, EnginePair], copy: LineProcess, pages: Pages, rounds: int) -> dict[str, list[Run]]:
    """The first round touches the memory and is not counted."""
    runs: dict[str, list[Run]] = {name: [] for name in ("memcpy", *engines)}
    for number in range(rounds + 1):
        for name, each in runs.items():
            run = copied(copy, pages) if name == "memcpy" else engines[name].run(pages)
            if number:
                each.append(run)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="bytes a round")
    parser.add_argument("--against", default="", help="other transports, separated by commas")
    options = parser.parse_args()
    report = Report()
    total = options.mib * MIB
    pool = 2 * total
    sizes = {
        "4 KiB": scattered(4 * KIB, total // 2, pool),
        "16 KiB": scattered(16 * KIB, total, pool),
        "64 KiB": scattered(64 * KIB, total, pool),
        "1 MiB": scattered(MIB, total, pool),
        "12 KiB in runs of 32": scattered(12 * KIB, total, pool, run=32),
    }
    names = ["local", *filter(None, options.against.split(","))]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(EnginePair(name, pool))) for name in names}
        local = engines["local"]
        copy = stack.enter_context(copier(local.source, local.destination))
        for label, pages in sizes.items():
            medians = {}
            for name, runs in measure(engines, copy, pages, options.rounds).items():
                rates = [pages.bytes / run.seconds / 1e9 for run in runs]
                medians[name] = statistics.median(rates)
                cpu = sum(run.cpu for run in runs) / (pages.bytes * len(runs) / 1e9)
                print(
                    f"  {label:20s} {name:8s} {medians[name]:6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})"
                    + (f", {cpu:.3f} CPU s/GB" if cpu else ""),
                    flush=True,
                )
            if label in ("16 KiB", "64 KiB", "1 MiB"):
                report.at_least(f"{label}, of a memcpy loop", medians["local"] / medians["memcpy"], OF_MEMCPY)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
