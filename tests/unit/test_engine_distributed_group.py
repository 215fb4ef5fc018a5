"""Ranks that combine through torch.distributed, over gloo in the place of NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from baton_engine.group_memory import make_rendezvous

RANKS = 3
RANK = """
import json, sys
import torch
from baton_engine.distributed_group import DistributedGroup

fd, rank, ranks = map(int, sys.argv[1:])
group = DistributedGroup(fd, rank, ranks, device=torch.device("cpu"), patience_s=20, backend="gloo")
group.meet()
group.begin(0)
rows = torch.arange(6.0).view(2, 3) * (rank + 1)
summed = group.all_reduce(rows.t()[:, :2])
gathered = group.all_gather(torch.full((2, rank + 1), float(rank)))
# A rank that has left a step begins the next with the others.
if rank == 0:
    group.abort()
group.begin(1)
again = group.all_reduce(torch.ones(1))
print(json.dumps([summed.tolist(), gathered.tolist(), again.tolist()]))
"""


@pytest.fixture(scope="module")
def answers() -> list[list]:
    fd = make_rendezvous()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(fd), str(rank), str(RANKS)],
            pass_fds=[fd],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    os.close(fd)
    try:
        return [json.loads(child.communicate(timeout=100)[0]) for child in children]
    finally:
        for child in children:
            child.kill()


def test_a_sum_is_the_same_on_every_rank(answers):
    expected = [[0.0, 18.0], [6.0, 24.0], [12.0, 30.0]]
    assert [summed for summed, _, _ in answers] == [expected] * RANKS


def test_parts_of_unequal_width_are_put_side_by_side(answers):
    assert [gathered for _, gathered, _ in answers] == [[[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2] * RANKS


def test_after_a_step_that_a_rank_gave_up_the_next_is_summed_again(answers):
    assert [again for _, _, again in answers] == [[float(RANKS)]] * RANKS
