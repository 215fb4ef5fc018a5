"""From SIGKILL to one side until the other has a typed failure.

The receiver's engine is killed under an engine that writes to it; and the sending agent is killed, with everything as
it is by default, under a receiving agent whose worker waits for the transfer.

    python tests/bench/killed.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report

from agent_kit import Model, extents, worker
from agent_processes import FAST, Agent
from baton_config.sections import AgentSettings
from baton_fabric._native import PeerFailed, TransferDone, TransferFailed
from conditions import until
from fabric_harness import Pair, wait_until

MIB = 1 << 20
PROVIDERS = ("tcp", "shm")
BAR_S = 1.0


def killed_receiver(provider: str) -> float:
    """Seconds from SIGKILL until the sender has the typed failure of the peer and of its transfers."""
    with closing(Pair(provider, remote="receiver", layers=2, pages=32, page_bytes=MIB)) as pair:
        pair.sender.fill()
        pages = list(range(32))
        transfers = [pair.open(pages, pages) for _ in range(3)]
        for step, transfer in enumerate(transfers):
            pair.run_step(step)
            pair.sender.engine.submit_chunks([(transfer, step * 2, 0, len(pages), True)])
        wait_until(lambda: bool(pair.receiver.bytes[0, 0, 0]), "the first byte arrives")
        pair.receiver.signal(signal.SIGKILL)
        begin = time.monotonic()
        pair.sender.wait(PeerFailed)
        ended: list[Any] = pair.sender.wait(TransferFailed, TransferDone, count=3)
        seconds = time.monotonic() - begin
        assert any(isinstance(each, TransferFailed) for each in ended)
        return seconds


async def killed_sender(transport: str, chance: random.Random) -> float:
    """Seconds from SIGKILL of the sending agent until the receiving worker hears that its inbox failed."""
    usual = {name: str(AgentSettings.model_fields[name].default) for name in FAST}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bt-")))
        prefill, decode = (Agent(directory, name, transport, **usual) for name in ("p", "d"))
        stack.callback(decode.stop)
        stack.callback(prefill.kill)
        source, target = (stack.enter_context(closing(Model())) for _ in range(2))
        source.fill(3)
        async with worker(prefill.target, source) as sender, worker(decode.target, target) as receiver:
            inbox = await receiver.open_inbox(sender.agent, extents(2))
            transfer = await sender.open_transfer(inbox, [0, 1], [0, 1])
            await sender.submit(0, (transfer, 0, 2, True))
            source.counter.advance(1)
            await until(lambda: any(target.page(0, 1)), "the first layer's pages")
            # Anywhere between two heartbeats.
            await asyncio.sleep(chance.uniform(0.0, float(usual["heartbeat_s"])))
            prefill.signal(signal.SIGKILL)
            begin = time.monotonic()
            await receiver.event("inbox_failed")
            return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds: int = parser.parse_args().rounds
    report = Report()
    chance = random.Random(0)
    for provider in PROVIDERS:
        slowest = max(killed_receiver(provider) for _ in range(rounds))
        report.at_most(f"receiver killed until the sender's typed failure, {provider}, slowest", slowest, BAR_S, "s")
    for provider in PROVIDERS:
        slowest = max(asyncio.run(killed_sender(provider, chance)) for _ in range(rounds))
        report.at_most(f"sending agent killed until the inbox has failed, {provider}, slowest", slowest, BAR_S, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
