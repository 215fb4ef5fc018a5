"""An agent whose settings put faults at its fabric: a process whose failures are answered as real ones."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from agent_kit import LAYERS, Model, extents, worker
from agent_processes import Agent, agents


@pytest.fixture
def directory():
    # Not tmp_path: the paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bt-") as path:
        yield Path(path)


async def test_a_fault_of_the_settings_fails_one_transfer_and_the_next_is_done(directory):
    plan = json.dumps({"rules": [{"at": "post", "action": "error", "nth": 3, "times": 1}]})
    source, target = Model(), Model()
    source.fill(3)
    with agents(directory, "tcp", "p", "d", faults=plan) as (prefill, decode):
        async with worker(prefill.target, source) as sender, worker(decode.target, target) as receiver:
            for turn in range(2):
                inbox = await receiver.open_inbox(sender.agent, extents(3))
                transfer = await sender.open_transfer(inbox, [4, 8, 15], [1, 3, 5])
                await sender.submit(turn, (transfer, 0, 3, True))
                source.counter.advance((turn + 1) * LAYERS)
                if turn:
                    await receiver.event("inbox_full")
                    await sender.event("transfer_done")
                else:
                    failed = await sender.event("transfer_failed")
                    assert (failed.transfer, failed.reason) == (transfer, "WRITE_FAILED")
                    heard = await receiver.event("inbox_failed")
                    assert (heard.slot, heard.quiesced) == (inbox.slot, True)
            assert source.page(2, 15) == target.page(2, 5)
        assert "faults at the fabric, for tests: 1 rules" in prefill.log.read_text()
    source.close()
    target.close()


def test_a_plan_that_means_nothing_ends_the_agent_before_it_serves(directory):
    agent = Agent(directory, "p", "tcp", faults='{"rules": [{"at": "post"}]}')
    try:
        assert agent.process.wait(30) != 0
    except subprocess.TimeoutExpired:
        agent.kill()
        raise
    assert "a fault has at and action" in agent.log.read_text()
