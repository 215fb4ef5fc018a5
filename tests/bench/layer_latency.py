"""From the store to the layer counter until the engine posts the layer's first write.

From just before the store, without what Python takes around it, to just before the provider is called with the write;
over tcp that call also carries the bytes as far as the socket takes them. The engine is in a process of its own, as an
agent is: in doorbell mode it sleeps until the counter's eventfd is rung, in spinning mode it never sleeps and has a CPU
of its own. One layer at a time, with a pause between them that is long enough to fall asleep in.

    python tests/bench/layer_latency.py [--layers 2000] [--pause-ms 2]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from line_processes import compiled
from statistics_of import percentile

from baton_memory import LayerCounter
from fabric_harness import Pair

BARS_US = {"doorbell": (25.0, 150.0), "spinning": (5.0, 20.0)}
PAGE_BYTES = 12 << 10
STORE = Path(__file__).parent / "native" / "store_counter.cpp"


def storing(counter: LayerCounter) -> Callable[[int], int]:
    """Stores and rings as `LayerCounter.advance` -> when, in nanoseconds."""
    function = ctypes.CDLL(str(compiled(STORE, "-shared", "-fPIC"))).store_counter
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    return lambda value: int(function(counter.address, value, counter.doorbell_fd))


def give_a_cpu(spinning: int) -> None:
    """To the progress thread of a process; every other thread of it and of this one goes to another."""
    own, *others = sorted(os.sched_getaffinity(0))
    for process in (os.getpid(), spinning):
        for task in Path(f"/proc/{process}/task").iterdir():
            spins = process == spinning and (task / "comm").read_text().strip() == "baton-fabric"
            os.sched_setaffinity(int(task.name), {own} if spins else set(others) or {own})


def latencies(spin: bool, layers: int, pause_ms: int) -> list[float]:
    """Microseconds, one for each transfer of a page and a layer."""
    times: list[float] = []
    pair = Pair("tcp", remote="sender", layers=1, pages=64, page_bytes=PAGE_BYTES, spin=spin)
    cpus = os.sched_getaffinity(0)
    with closing(pair):
        if spin:
            give_a_cpu(pair.sender.process.pid)
        store = storing(pair.sender.layer_counter)
        for number in range(layers):
            page = [number % pair.sender.pages]
            transfer = pair.open(page, page, slot=0, expected=1)
            pair.receiver.engine.open_inbox(pair.endpoint, 0, 0, 1)
            pair.sender.engine.submit_chunks([(transfer, number, 0, 1, True)])
            select.select([], [], [], pause_ms / 1e3)
            moved = store(number + 1)
            (done,) = pair.sender.wait_named(["TransferDone"], 1, 10.0)
            pair.receiver.engine.close_inbox(0, 0)
            times.append((done.stats["first_post_ns"] - moved) / 1e3)
    os.sched_setaffinity(0, cpus)
    return times[len(times) // 20 :]  # without those that connect and touch memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--pause-ms", type=int, default=2)
    options = parser.parse_args()
    report = Report()
    for mode, (half, nearly_all) in BARS_US.items():
        times = latencies(mode == "spinning", options.layers, options.pause_ms)
        print(f"  {mode}: least {min(times):.1f} us, most {max(times):.1f} us")
        report.at_most(f"counter moved to first post, {mode}, p50", percentile(times, 0.5), half, "us")
        report.at_most(f"counter moved to first post, {mode}, p99", percentile(times, 0.99), nearly_all, "us")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
