"""A thousand transfers at a time, and a cancel with 64 MiB in flight.

python tests/bench/in_flight.py [--samples 1000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import itertools
import random
import select
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from statistics_of import percentile

from baton_fabric._native import TransferCancelled, TransferDone, TransferFailed
from fabric_harness import Pair

MIB = 1 << 20
PAGE_BYTES = 64 << 10
LAYERS = 4
SHORT_PAGES = MIB // LAYERS // PAGE_BYTES
LONG_PAGES = 16 * SHORT_PAGES
PEERS = 4
LONG, SHORT = 900, 100
DEADLINE_S = 120.0


class Crowd:
    """Keeps `LONG` transfers of 16 MiB and `SHORT` of 1 MiB in flight over `PEERS` connections: one that ends is
    followed by another of its kind."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._engine = pair.sender.engine
        self._chance = random.Random(0)
        self._ids = itertools.count(1)
        self._begun: dict[int, tuple[bool, int, int]] = {}
        self.shorts_ns: list[int] = []
        self._peers: list[int] = []
        for slot in range(PEERS):
            endpoint, addresses = pair.receiver.engine.open_endpoint()
            # More than will ever come: what is measured is when the sender knows that all is delivered.
            pair.receiver.engine.open_inbox(endpoint, slot, 0, 1 << 40)
            self._peers.append(self._engine.connect(addresses))
        pair.run_step(0)

    def begin(self, short: bool, peer: int) -> None:
        transfer = next(self._ids)
        pages = SHORT_PAGES if short else LONG_PAGES
        lists = [self._chance.sample(range(self._pair.sender.pages), pages) for _ in range(2)]
        stream = self._pair.stream()
        counter = self._pair.sender.counter
        self._engine.open_transfer(transfer, self._peers[peer], peer, 0, counter, LAYERS, [stream], *lists)
        self._begun[transfer] = short, peer, time.monotonic_ns()
        self._engine.submit_chunks([(transfer, 0, 0, pages, True)])

    def follow(self, samples: int) -> float:
        """Until so many short ones have ended -> GB/s meanwhile."""
        for number in range(LONG + SHORT):
            self.begin(number % ((LONG + SHORT) // SHORT) == 0, number % PEERS)
        self._take(SHORT)
        self.shorts_ns.clear()
        before, begin = self._pair.sender.metric("bytes"), time.monotonic()
        self._take(samples)
        return (self._pair.sender.metric("bytes") - before) / (time.monotonic() - begin) / 1e9

    def _take(self, samples: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while len(self.shorts_ns) < samples:
            assert time.monotonic() < end, f"{len(self.shorts_ns)} short transfers in {DEADLINE_S} s"
            select.select([self._engine.event_fd], [], [], 1.0)
            for event in self._engine.events():
                assert isinstance(event, TransferDone), event
                short, peer, begun = self._begun.pop(event.transfer)
                if short:
                    self.shorts_ns.append(event.stats.last_completion_ns - begun)
                self.begin(short, peer)


def fairness(report: Report, samples: int) -> None:
    with closing(Pair("tcp", remote="receiver", layers=LAYERS, pages=512, page_bytes=PAGE_BYTES)) as pair:
        crowd = Crowd(pair)
        rate = crowd.follow(samples)
        times = [each / 1e6 for each in crowd.shorts_ns]
    share = MIB * (LONG + SHORT) / (rate * 1e6)
    print(
        f"  {LONG} x 16 MiB and {SHORT} x 1 MiB over {PEERS} peers: {rate:.2f} GB/s; 1 MiB takes p50"
        f" {percentile(times, 0.5):.0f} ms, p99 {percentile(times, 0.99):.0f} ms; its fair share is {share:.0f} ms"
    )
    report.at_most("1,000 in flight: p99 of 1 MiB, of its fair share", percentile(times, 0.99) / share, 3.0)


def cancel(report: Report, rounds: int, connections: int) -> None:
    """So many peers with a transfer each, in layers of 64 MiB as writes of 1 MiB, all cancelled at once. A peer has 16
    MiB in flight at most, so four of them 64 MiB."""
    times: list[float] = []
    in_flight: list[int] = []
    with closing(Pair("tcp", remote="receiver", layers=LAYERS, pages=64, page_bytes=MIB)) as pair:
        engine = pair.sender.engine
        crowd = [pair.receiver.engine.open_endpoint() for _ in range(connections)]
        peers = [engine.connect(address) for _, address in crowd]
        pages = list(range(pair.sender.pages))
        pair.run_step(0)
        for number in range(rounds + 1):
            transfers = range(number * connections, (number + 1) * connections)
            for slot, (endpoint, _) in enumerate(crowd):
                pair.receiver.engine.open_inbox(endpoint, slot, number, 1 << 40)
                engine.open_transfer(
                    transfers[slot],
                    peers[slot],
                    slot,
                    number,
                    pair.sender.counter,
                    LAYERS,
                    [pair.stream()],
                    pages,
                    pages,
                )
            engine.submit_chunks([(transfer, 0, 0, len(pages), True) for transfer in transfers])
            # Also without that, when the machine is so busy that they end before one looks.
            while (
                pair.sender.metric("bytes_in_flight") < 15 * connections * MIB
                and pair.sender.metric("transfers") == connections
            ):
                select.select([], [], [], 1e-4)
            amount = pair.sender.metric("bytes_in_flight")
            begin = time.monotonic()
            for transfer in transfers:
                engine.cancel_transfer(transfer)
            ended = pair.sender.wait(TransferCancelled, TransferDone, TransferFailed, count=connections)
            seconds = time.monotonic() - begin
            for slot in range(connections):
                pair.receiver.engine.close_inbox(slot, number)
            if number and all(isinstance(event, TransferCancelled) and event.quiesced for event in ended):
                times.append(seconds * 1e3)
                in_flight.append(amount)
    assert times, "no transfer was still going when it was cancelled"
    print(
        f"  cancelled with {statistics.median(in_flight) / MIB:.0f} MiB in flight: {min(times):.1f} to"
        f" {max(times):.1f} ms, {len(times)} times"
    )
    name = f"cancel to quiesced, {connections} x 64 MiB begun"
    report.at_most(f"{name}, median", statistics.median(times), 50.0, "ms")
    report.at_most(f"{name}, slowest", max(times), 50.0, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    report = Report()
    fairness(report, options.samples)
    for peers in (1, PEERS):
        cancel(report, options.rounds, peers)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
