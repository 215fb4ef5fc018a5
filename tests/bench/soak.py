"""Memory over many transfers, and none allocated a page: two engines of one process over tcp, on demand.

Transfers of random pages go through, are cancelled, lose their connection or are fenced off; each ends in exactly one
terminal event, what was delivered is compared byte by byte, and at the end nothing is left. With --minutes the same
goes on for so long, with larger transfers; otherwise it is 100,000 small ones.

    python tests/bench/soak.py [--transfers 100000] [--minutes 10]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from line_processes import compiled

from baton_fabric._native import InboxFull, TransferCancelled, TransferDone, TransferFailed
from fabric_harness import Pair

PRELOADED = Path(__file__).parent / "native" / "count_allocations.cpp"
LAYERS, PAGES, PAGE_BYTES = 2, 2048, 4096
AT_A_TIME = 16
SLOTS = 4096
TERMINAL = (TransferDone, TransferCancelled, TransferFailed)
LEVELS = ("transfers", "writes_in_flight", "bytes_in_flight", "inboxes", "peers", "endpoints")
MIB = 1 << 20
# libfabric's tcp provider forgets a description of 15 allocations (1.7 KiB) with each of its endpoints. They lie among
# what else a connection takes and gives back, so that the heap grows by some 7.5 KiB a reconnect; without reconnects it
# doesn't grow at all.
LOST_A_RECONNECT = 30
LOST_BYTES_A_RECONNECT = 8 << 10


class Allocator:
    """What count_allocations.cpp counted, of this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._made, self._live = library.baton_allocations, library.baton_live_allocations
        for function in (self._made, self._live):
            function.restype = ctypes.c_uint64

    def made(self) -> int:
        return int(self._made())

    def live(self) -> int:
        return int(self._live())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sent:
    slot: int
    generation: int
    source: list[int]
    destination: list[int]


class Soak:
    """Batches of transfers that are in flight at the same time."""

    def __init__(self, pair: Pair, most_pages: int) -> None:
        self.pair = pair
        self.outcomes: Counter[str] = Counter()
        self._most_pages = most_pages
        self._chance = random.Random(0)
        self._step = 0
        self._opened = 0
        self.reconnects = 0

    def batch(self, mishap: str = "none") -> None:
        """`mishap`: none, cancel (some of them), disconnect (the sender) or fence (the receiver)."""
        pair, chance = self.pair, self._chance
        free = chance.sample(range(PAGES), AT_A_TIME * self._most_pages)
        sent: dict[int, Sent] = {}
        for number in range(AT_A_TIME):
            count = chance.randint(1, self._most_pages)
            slot, generation = self._opened % SLOTS, self._opened // SLOTS
            self._opened += 1
            places = free[number * self._most_pages :][:count]
            one = Sent(slot, generation, chance.choices(range(PAGES), k=count), places)
            pair.receiver.engine.open_inbox(pair.endpoint, slot, generation, LAYERS * count)
            transfer = pair.open(one.source, one.destination, slot=slot, generation=generation)
            sent[transfer] = one
        base, self._step = self._step * LAYERS, self._step + 1
        chunks = [(transfer, base, 0, len(one.source), True) for transfer, one in sent.items()]
        pair.sender.engine.submit_chunks(chunks)
        pair.run_step(self._step - 1)
        if mishap == "cancel":
            for transfer in chance.sample(sorted(sent), AT_A_TIME // 4):
                pair.sender.engine.cancel_transfer(transfer)
        elif mishap == "disconnect":
            pair.sender.engine.disconnect(pair.peer)
        elif mishap == "fence":
            pair.receiver.engine.close_endpoint(pair.endpoint)
        self._settle(sent, fenced=mishap == "fence")
        if mishap in ("disconnect", "fence"):
            self._reconnect(fenced=mishap == "fence")

    def _settle(self, sent: dict[int, Sent], *, fenced: bool) -> None:
        pair = self.pair
        ends = {event.transfer: event for event in pair.sender.wait(*TERMINAL, count=len(sent))}
        assert ends.keys() == sent.keys()
        delivered = [sent[number] for number, event in ends.items() if isinstance(event, TransferDone)]
        self.outcomes.update(type(event).__name__ for event in ends.values())
        if not fenced:
            # With others from before an end that was no delivery.
            full = {(event.slot, event.generation) for event in pair.receiver.wait(InboxFull, count=len(delivered))}
            assert {(one.slot, one.generation) for one in delivered} <= full or len(delivered) < len(sent)
            for one in sent.values():
                pair.receiver.engine.close_inbox(one.slot, one.generation)
        for one in delivered:
            assert (pair.receiver.bytes[:, one.destination] == pair.sender.bytes[:, one.source]).all()

    def _reconnect(self, *, fenced: bool) -> None:
        pair = self.pair
        self.reconnects += 1
        if fenced:
            pair.sender.engine.disconnect(pair.peer)
        else:
            pair.receiver.engine.close_endpoint(pair.endpoint)
        pair.sender.seen.clear()
        pair.sender.engine.events()
        pair.receiver.seen.clear()
        pair.receiver.engine.events()
        pair.connect()

    def mishap(self, batch: int) -> str:
        if batch % 50 == 49:
            return self._chance.choice(["disconnect", "fence"])
        return "cancel" if batch % 5 == 4 else "none"

    def levels(self) -> dict[str, int]:
        """What is open, of both engines."""
        sides: tuple[Any, Any] = self.pair.sender, self.pair.receiver
        return {name: sum(side.metric(name) for side in sides) for name in LEVELS}


def allocations_a_page(pair: Pair, allocator: Allocator) -> float:
    """From the plan to the terminal event: what a thousand pages allocate more than a few do, by page and layer."""
    made: dict[int, int] = {}
    step = pair.sender.layer_counter.value() // LAYERS
    for turn in range(40):
        count = 1024 if turn % 2 else 8
        pages = random.Random(turn).sample(range(PAGES), count)
        pair.receiver.engine.open_inbox(pair.endpoint, 0, turn, LAYERS * count)
        transfer = pair.open(pages, pages, slot=0, generation=turn)
        before = allocator.made()
        pair.sender.engine.submit_chunks([(transfer, (step + turn) * LAYERS, 0, count, True)])
        pair.run_step(step + turn)
        pair.sender.wait(TransferDone)
        pair.receiver.wait(InboxFull)
        # The least: now and then a queue of libfabric's grows, for good.
        made[count] = min(made.get(count, 1 << 60), allocator.made() - before)
        pair.receiver.engine.close_inbox(0, turn)
    print(f"  allocations of a transfer: {made[8]} for 8 pages, {made[1024]} for 1,024")
    return (made[1024] - made[8]) / (LAYERS * (1024 - 8))


def run(report: Report, allocator: Allocator, transfers: int, minutes: float) -> None:
    with closing(Pair("tcp", layers=LAYERS, pages=PAGES, page_bytes=PAGE_BYTES, post_timeout_ms=300)) as pair:
        pair.sender.fill()
        soak = Soak(pair, most_pages=64 if minutes else 4)
        end = time.monotonic() + 60 * minutes
        warm = (0, 0)
        reconnects = 0
        batch = 0
        # A tenth to get warm: pools grow, memory is touched, every slot is used once.
        while batch * AT_A_TIME < transfers if not minutes else time.monotonic() < end:
            soak.batch(soak.mishap(batch))
            batch += 1
            left = (end - time.monotonic()) / 60 / minutes if minutes else 1 - batch * AT_A_TIME / transfers
            if left < 0.9 and warm == (0, 0) and batch * AT_A_TIME > SLOTS:
                warm = resident_bytes(), allocator.live()
                reconnects = soak.reconnects
        grown = resident_bytes() - warm[0], allocator.live() - warm[1]
        reconnects = soak.reconnects - reconnects
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(soak.outcomes.items()))
        print(f"  {batch * AT_A_TIME} transfers: {outcomes}; {resident_bytes() / MIB:.0f} MiB resident")
        more = f"{grown[0] / MIB:.2f} MiB and {grown[1]} live allocations more"
        print(f"  after the first tenth: {reconnects} reconnects, {more}")
        memory = grown[0] - LOST_BYTES_A_RECONNECT * reconnects
        report.at_most("memory of ours grown after the first tenth", memory / MIB, 1.0, "MiB")
        ours = grown[1] - LOST_A_RECONNECT * reconnects
        report.at_most("live allocations of ours grown after the first tenth", ours, 200)
        left_over = sum(soak.levels().values()) - 2  # one peer and one endpoint are meant to be there
        report.at_most("left open at the end", left_over, 0)
        report.at_most("allocations a page and layer", allocations_a_page(pair, allocator), 0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=0.0)
    options = parser.parse_args()
    library = str(compiled(PRELOADED, "-shared", "-fPIC"))
    if library not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})
    report = Report()
    run(report, Allocator(), options.transfers, options.minutes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
