"""What prefills do to running streams: colocated on two cores against one prefill and one decode worker, a core each.

Steady decode streams run first alone, then while prompts of 1,024 tokens arrive. Prints inter-token latency, time to
first token and throughput of both layouts with their ratios, and draws the inter-token latencies.

    python tests/bench/interference.py [--rounds 2] [--plot interference.png]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from statistics_of import percentile, summary

from cluster import Answer, Cluster, running_cluster

STREAM_PROMPT_TOKENS = 64
LAYOUTS = ("disaggregated", "colocated")


@dataclass
class Phase:
    """Inter-token latencies (s) with the time they were seen, and what the arriving prompts met."""

    itl: list[tuple[float, float]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    unloaded: Phase = field(default_factory=Phase)
    loaded: Phase = field(default_factory=Phase)


class Recorder:
    """Watches one stream; its intervals go to whichever phase is current."""

    def __init__(self) -> None:
        self.phase: Phase | None = None

    def watch(self) -> object:
        last: float | None = None

        def on_token(answer: Answer) -> None:
            nonlocal last
            now = answer.token_times[-1]
            if last is not None and self.phase is not None:
                self.phase.itl.append((now, now - last))
                self.phase.tokens += 1
            last = now

        return on_token


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


async def keep_streaming(cluster: Cluster, recorder: Recorder, rng: random.Random, tokens: int) -> None:
    while True:
        await cluster.generate(
            prompt(rng, STREAM_PROMPT_TOKENS), max_tokens=tokens, on_token=recorder.watch(), timeout=600
        )


async def one_prompt(cluster: Cluster, phase: Phase, tokens: list[int]) -> None:
    began = time.monotonic()
    answer = await cluster.generate(tokens, max_tokens=2, timeout=600)
    phase.ttft.append(answer.token_times[0] - began)


async def measure(layout: str, options: argparse.Namespace) -> Outcome:
    """One run: start, unloaded phase, loaded phase."""
    cpus = sorted(os.sched_getaffinity(0))
    first, second = cpus[0], cpus[-1]
    rng = random.Random(options.seed)
    if layout == "colocated":
        arguments = {"colocated": True, "cpus": {"decode-0": f"{first},{second}"}}
    else:
        arguments = {"cpus": {"prefill-0": str(first), "decode-0": str(second)}}
    outcome = Outcome()
    async with running_cluster(**arguments) as cluster:
        await cluster.generate(prompt(rng, 1024), max_tokens=4)
        recorder = Recorder()
        streams = [
            asyncio.create_task(keep_streaming(cluster, recorder, random.Random(i), options.stream_tokens))
            for i in range(options.streams)
        ]
        try:
            await asyncio.sleep(options.settle)
            recorder.phase = outcome.unloaded
            await asyncio.sleep(options.unloaded)
            outcome.unloaded.seconds = options.unloaded
            recorder.phase = outcome.loaded
            began = time.monotonic()
            arrivals = []
            for _ in range(options.prompts):
                arrivals.append(asyncio.create_task(one_prompt(cluster, outcome.loaded, prompt(rng, 1024))))
                await asyncio.sleep(options.interval)
            await asyncio.gather(*arrivals)
            outcome.loaded.seconds = time.monotonic() - began
            recorder.phase = None
            for stream in streams:
                if stream.done():
                    stream.result()
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return outcome


def report(outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    """Prints the table; medians over the rounds."""
    figures: dict[str, dict[str, float]] = {}
    for layout, rounds in outcomes.items():
        rows = []
        for outcome in rounds:
            row = {}
            for name, phase in (("unloaded", outcome.unloaded), ("loaded", outcome.loaded)):
                for key, value in summary([interval for _, interval in phase.itl]).items():
                    row[f"itl {name} {key} ms"] = value * 1e3
                row[f"throughput {name} tok/s"] = phase.tokens / phase.seconds
            row["ttft p50 s"] = percentile(outcome.loaded.ttft, 0.5)
            row["ttft max s"] = max(outcome.loaded.ttft)
            rows.append(row)
        figures[layout] = {key: percentile([row[key] for row in rows], 0.5) for key in rows[0]}
    print(f"{'':30s}" + "".join(f"{layout:>16s}" for layout in figures) + f"{'ratio':>10s}")
    for key in figures["disaggregated"]:
        ours, theirs = figures["disaggregated"][key], figures["colocated"][key]
        print(f"{key:30s}{ours:16.2f}{theirs:16.2f}{theirs / ours if ours else float('nan'):10.2f}")
    ours, theirs = figures["disaggregated"], figures["colocated"]
    bars = {
        "p99 loaded / p99 unloaded, disaggregated (bar: at most 1.5)": ours["itl loaded p99 ms"]
        / ours["itl unloaded p99 ms"],
        "p99 loaded, colocated / disaggregated (bar: at least 4)": theirs["itl loaded p99 ms"]
        / ours["itl loaded p99 ms"],
    }
    for name, value in bars.items():
        print(f"{name}: {value:.2f}")
    return bars


def draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(outcomes), 1, figsize=(10, 7), sharex=True, sharey=True)
    for axis, (layout, rounds) in zip(axes, outcomes.items(), strict=True):
        points = rounds[-1].unloaded.itl + rounds[-1].loaded.itl
        start = points[0][0]
        boundary = rounds[-1].loaded.itl[0][0] - start
        axis.scatter([at - start for at, _ in points], [value * 1e3 for _, value in points], s=4)
        axis.axvline(boundary, color="grey", linestyle="--")
        axis.annotate("prompts of 1,024 tokens arrive", (boundary, 1), xycoords=("data", "axes fraction"), va="top")
        axis.set_yscale("log")
        axis.set_ylabel("inter-token latency (ms)")
        axis.set_title(layout)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="A B pairs")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=512)
    parser.add_argument("--settle", type=float, default=5.0)
    parser.add_argument("--unloaded", type=float, default=20.0)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between arriving prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("interference.png"))
    parser.add_argument("--json", type=Path, help="writes the raw figures")
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {layout: [] for layout in LAYOUTS}
    for index in range(options.rounds):
        for layout in LAYOUTS:
            print(f"round {index + 1}: {layout}", flush=True)
            outcomes[layout].append(await measure(layout, options))
    bars = report(outcomes)
    draw(outcomes, options.plot)
    if options.json:
        options.json.write_text(json.dumps(bars))
    ratio, gain = bars.values()
    return 0 if ratio <= 1.5 and gain >= 4 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
