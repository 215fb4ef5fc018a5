"""CPU that an idle cluster uses, all services and model processes together.

python tests/bench/idle.py [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Cluster, running_cluster

BAR_PERCENT = 3.0


def cpu_seconds(cluster: Cluster) -> dict[str, float]:
    used = {}
    for name, service in cluster.services.items():
        process = psutil.Process(service.pid)
        for each, label in [(process, name), *((child, f"{name} model") for child in process.children(recursive=True))]:
            times = each.cpu_times()
            used[label] = times.user + times.system
    return used


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--transport", default="tcp")
    seconds, transport = (options := parser.parse_args()).seconds, options.transport
    async with running_cluster(transport=transport) as cluster:
        await cluster.generate("Warm up.", max_tokens=8)
        await cluster.at_rest(10)
        before = cpu_seconds(cluster)
        await asyncio.sleep(seconds)
        after = cpu_seconds(cluster)
    total = 0.0
    for name, used in after.items():
        percent = 100 * (used - before[name]) / seconds
        total += percent
        print(f"{name:28s} {percent:6.2f} % of a core")
    print(f"{'all services':28s} {total:6.2f} % of a core (bar: under {BAR_PERCENT} %)")
    return 0 if total < BAR_PERCENT else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
