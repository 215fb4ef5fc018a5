"""The engine against NIXL (UCX) and Mooncake, over tcp and between two processes of one host.

Both are installed into an environment of their own under build/ (about 300 MB), never into the project's. What is
timed is the same for all: pages scattered over a pool, from the call that sends them until the receiver sees that all
have arrived. Everyone takes turns, round by round, over the same pools, with half of the cores a side, in several fresh
pairs of processes. NIXL's progress thread is off, which is its faster setting. Mooncake takes no part where pages are
coalesced: it refused pools of more than 64 MiB ("Bad address"), which the others move in five milliseconds.

NIXL and a bare loop poll without end; an engine does where `agent.spin` is set, and sleeps by default where it has
nothing to do. Over tcp that costs a wake-up a write, some 5 % at these speeds: about the bar for coalesced pages. So
those are also compared like with like: spinning with the better of those that poll, sleeping with a bare loop that
sleeps as well.

    python tests/bench/peers.py [--pairs 3] [--rounds 7] [--mib 128]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from engine_pair import EnginePair
from line_processes import BUILD, LinePair, LineProcess, Run, bare_pair, copier
from loopback import own_loopback
from pages import Pages, scattered

from baton_fabric.errors import FabricError

NODE = "127.0.0.1"
KIB = 1 << 10
MIB = 1 << 20
VENV = BUILD / "peers"
PACKAGES = {"nixl": "nixl-cu12==1.5.1", "mooncake": "mooncake-transfer-engine-non-cuda==0.3.13.post1"}
MODULES = {"nixl": "nixl_cu12", "mooncake": "mooncake.engine"}
MOST_MOONCAKE_MIB = 32
QUIET = {"NIXL_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}

# name -> what it takes to move these pages once
Movers = dict[str, Callable[[Pages], Run]]


def python_with(peer: str) -> Path | str:
    """The interpreter that has this peer, installed if need be; or why there is none."""
    python = VENV / "bin" / "python"
    steps: list[list[str]] = []
    if not python.exists():
        steps.append([sys.executable, "-m", "venv", str(VENV)])
    # Without their dependencies, which are gigabytes for GPUs; numpy is all that this needs.
    steps.append([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "numpy", PACKAGES[peer]])
    steps.append([str(python), "-c", f"import {MODULES[peer]}"])
    for step in steps if not _works(python, peer) else []:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{PACKAGES[peer]} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return python


def _works(python: Path, peer: str) -> bool:
    command = [str(python), "-c", f"import {MODULES[peer]}"]
    return python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def peer_pair(python: Path, peer: str, engine: EnginePair, environment: dict[str, str]) -> Iterator[LinePair]:
    program = python, Path(__file__).with_name("peer_side.py"), peer
    pools = engine.source, engine.destination
    pair = LinePair(*(LineProcess(*program, *pool, pools=[pool], environment=environment) for pool in pools))
    try:
        yield pair
    finally:
        pair.close()


def line_mover(pair: LinePair, *, wait: bool = False) -> Callable[[Pages], Run]:
    return lambda pages: pair.run(pages.run * pages.page_bytes, pages.writes(), wait=wait)


def spinning(pool_bytes: int) -> Callable[[Pages], Run]:
    """Engines that spin, there for their turn only: they would take the cores in the turns of others."""

    def move(pages: Pages) -> Run:
        with closing(EnginePair("tcp", pool_bytes, spin=True)) as engine:
            engine.run(pages)  # touches the memory
            return engine.run(pages)

    return move


class Rates:
    """GB/s of everyone's runs, by size and name."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, list[float]]] = {}

    def measure(self, movers: Movers, label: str, pages: Pages, rounds: int) -> None:
        """By turns; the first round touches the memory."""
        runs = self._runs.setdefault(label, {})
        for number in range(rounds + 1):
            for name, move in movers.items():
                seconds = move(pages).seconds
                if number:
                    runs.setdefault(name, []).append(pages.bytes / seconds / 1e9)

    def medians(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Of each size, after its table."""
        for label, runs in self._runs.items():
            for name, rates in runs.items():
                median = statistics.median(rates)
                print(f"  {label:20s} {name:14s} {median:6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")
            yield label, {name: statistics.median(rates) for name, rates in runs.items()}


def apart(total: int) -> dict[str, Pages]:
    return {f"{kib} KiB": scattered(kib * KIB, total, 2 * total) for kib in (16, 64)}


def coalesced(total: int) -> dict[str, Pages]:
    names = {4: "256 KiB coalesced", 16: "1 MiB coalesced"}
    return {name: scattered(64 * KIB, total, 2 * total, run=run) for run, name in names.items()}


def over_tcp(report: Report, pythons: dict[str, Path], mib: int, pairs: int, rounds: int) -> None:
    measured = Rates()
    total = min(mib, MOST_MOONCAKE_MIB) * MIB
    _take_turns_over_tcp(measured, pythons, total, apart(total), pairs, rounds, both_ways=False)
    others = {peer: python for peer, python in pythons.items() if peer != "mooncake"}
    _take_turns_over_tcp(measured, others, mib * MIB, coalesced(mib * MIB), pairs, rounds, both_ways=True)
    for label, rates in measured.medians():
        if not label.endswith("coalesced"):
            if "nixl" in rates:
                report.at_least(f"tcp {label}, of NIXL", rates["engine"] / rates["nixl"], 1.0)
            if "mooncake" in rates:
                report.at_least(f"tcp {label}, of Mooncake", rates["engine"] / rates["mooncake"], 1.5)
        else:
            best = max(rates["bare"], rates.get("nixl", 0.0))
            report.at_least(f"tcp {label}, of the better of NIXL and bare", rates["engine"] / best, 0.95)
            report.at_least(f"tcp {label}, spinning, of the better of NIXL and bare", rates["spinning"] / best, 0.95)
            report.at_least(f"tcp {label}, of bare that sleeps too", rates["engine"] / rates["bare, sleeping"], 0.95)


def _take_turns_over_tcp(
    measured: Rates,
    pythons: dict[str, Path],
    total: int,
    sizes: dict[str, Pages],
    pairs: int,
    rounds: int,
    *,
    both_ways: bool,
) -> None:
    """`both_ways`: an engine that spins and a bare loop that sleeps take part too."""
    for _ in range(pairs):
        with ExitStack() as stack:
            engine = stack.enter_context(closing(EnginePair("tcp", 2 * total)))
            bare = bare_pair(engine.provider, NODE, engine.window, engine.source, engine.destination)
            line = stack.enter_context(bare)
            movers: Movers = {"engine": engine.run, "bare": line_mover(line)}
            if both_ways:
                movers |= {"bare, sleeping": line_mover(line, wait=True), "spinning": spinning(2 * total)}
            for peer, python in pythons.items():
                environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "MC_FORCE_TCP": "1", **QUIET}
                movers[peer] = line_mover(stack.enter_context(peer_pair(python, peer, engine, environment)))
            for label, pages in sizes.items():
                measured.measure(movers, label, pages, rounds)


def on_one_host(report: Report, pythons: dict[str, Path], total: int, pairs: int, rounds: int) -> None:
    measured = Rates()
    for _ in range(pairs):
        with ExitStack() as stack:
            try:
                engine = stack.enter_context(closing(EnginePair("local", 2 * total)))
            except FabricError as error:
                report.skip("two agents on one host", str(error))
                return
            copy = stack.enter_context(copier(engine.source, engine.destination))
            movers: Movers = {"engine": engine.run, "memcpy": copied_by(copy)}
            if "nixl" in pythons:
                movers["nixl"] = line_mover(stack.enter_context(peer_pair(pythons["nixl"], "nixl", engine, QUIET)))
            for label, pages in (apart(total) | coalesced(total)).items():
                if not label.startswith("256"):
                    measured.measure(movers, label, pages, rounds)
    for label, rates in measured.medians():
        if "nixl" in rates:
            report.at_least(f"local {label}, of NIXL's best", rates["engine"] / rates["nixl"], 1.2)
        report.at_least(f"local {label}, of a memcpy loop", rates["engine"] / rates["memcpy"], 0.85)


def copied_by(copy: LineProcess) -> Callable[[Pages], Run]:
    def copied(pages: Pages) -> Run:
        copy.load(pages.run * pages.page_bytes, pages.writes())
        return Run(copy.span("copy"), 0.0)

    return copied


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="fresh processes of each, one pair after the other")
    parser.add_argument("--rounds", type=int, default=7, help="of each pair, for each size")
    parser.add_argument("--mib", type=int, default=128, help="moved a round")
    parser.add_argument("--only", choices=["tcp", "local"])
    options = parser.parse_args()
    report = Report()
    pythons: dict[str, Path] = {}
    for peer in PACKAGES:
        found = python_with(peer)
        if isinstance(found, Path):
            pythons[peer] = found
        else:
            report.skip(peer, found)
    print(own_loopback(), flush=True)
    if options.only != "local":
        over_tcp(report, pythons, options.mib, options.pairs, options.rounds)
    if options.only != "tcp":
        on_one_host(report, pythons, options.mib * MIB, options.pairs, options.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
