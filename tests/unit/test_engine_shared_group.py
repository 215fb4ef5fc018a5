"""Ranks that combine through shared memory: sums, rows side by side, and ranks that do not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine._collectives import PIECE_BYTES
from baton_engine.errors import SpecInvalid
from baton_engine.group_memory import make_memory
from baton_engine.shared_group import SharedGroup
from baton_memory import SharedMemory
from baton_model.errors import GroupBroken, InvalidBatch
from rank_threads import on_ranks


def shard(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_are_in_order_of_rank_and_the_same_bits_everywhere(ranks: int) -> None:
    sums = on_ranks(ranks, lambda group: group.all_reduce(shard(group.rank, 5, 7)))
    wanted = shard(0, 5, 7)
    for rank in range(1, ranks):
        wanted = wanted + shard(rank, 5, 7)
    assert all(torch.equal(found, wanted) for found in sums)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bfloat16_is_added_up_in_float32_and_rounded_once(ranks: int) -> None:
    sums = on_ranks(ranks, lambda group: group.all_reduce(shard(group.rank, 3000, dtype=torch.bfloat16)))
    wanted = sum(shard(rank, 3000, dtype=torch.bfloat16).float() for rank in range(ranks))
    assert all(torch.equal(found, wanted.to(torch.bfloat16)) for found in sums)


def test_what_is_no_number_stays_none() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e38], dtype=torch.bfloat16)
    found = on_ranks(2, lambda group: group.all_reduce(values.clone()))[0]
    assert torch.isnan(found[0]) and torch.isinf(found[1])
    assert found[2] == 0 and torch.signbit(found[2]) and found[3] == torch.tensor(2e38, dtype=torch.bfloat16)


@settings(max_examples=20)
@given(ranks=st.integers(2, 4), sizes=st.lists(st.integers(0, 3 * PIECE_BYTES // 4 + 5), min_size=1, max_size=4))
def test_any_sizes_one_after_the_other(ranks: int, sizes: list[int]) -> None:
    def work(group: SharedGroup) -> list[torch.Tensor]:
        return [group.all_reduce(torch.full((size,), float(group.rank + at))) for at, size in enumerate(sizes)]

    for found in on_ranks(ranks, work):
        for at, size in enumerate(sizes):
            assert torch.equal(found[at], torch.full((size,), float(sum(range(ranks)) + at * ranks)))


@settings(max_examples=20)
@given(
    widths=st.lists(st.sampled_from([1, 2, 3, 17, PIECE_BYTES // 8 + 3]), min_size=1, max_size=4),
    rows=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_rows_come_side_by_side(widths: list[int], rows: int, dtype: torch.dtype) -> None:
    parts = [
        (torch.arange(rows * width).view(rows, width) * (rank + 2) % 251).to(dtype) for rank, width in enumerate(widths)
    ]
    wanted = torch.cat(parts, dim=-1)
    for found in on_ranks(len(widths), lambda group: group.all_gather(parts[group.rank])):
        assert torch.equal(found, wanted) and found.dtype == dtype


def test_a_tensor_that_lies_in_strides_is_added_up_as_it_looks() -> None:
    x = torch.arange(12.0).view(3, 4).T
    assert all(torch.equal(found, x * 2) for found in on_ranks(2, lambda group: group.all_reduce(x)))


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(InvalidBatch, match="float64"):
        on_ranks(1, lambda group: group.all_reduce(torch.zeros(2, dtype=torch.float64)))


@pytest.mark.parametrize("ranks", [0, 65])
def test_impossible_numbers_of_ranks(ranks: int) -> None:
    with pytest.raises(SpecInvalid, match="1 to 64"):
        make_memory(ranks)


# --- ranks that do not come -----------------------------------------------------------------------------------------


def failures(ranks: int, work: object, **options: float) -> list[GroupBroken | None]:
    """What each rank's `work` raised."""

    def caught(group: SharedGroup) -> GroupBroken | None:
        try:
            work(group)  # type: ignore[operator]
        except GroupBroken as error:
            return error
        return None

    return on_ranks(ranks, caught, **options)


def test_a_rank_that_gives_up_ends_the_others_calls() -> None:
    found = failures(3, lambda group: group.abort() if group.rank == 1 else group.all_reduce(torch.ones(4)))
    assert [error is not None for error in found] == [True, False, True]
    assert all(error.fields["rank"] == "1" and error.fields["failure"] == "aborted" for error in found if error)


def test_after_a_failed_step_the_next_one_begins_clean() -> None:
    """Whatever the ranks had called: one of them fails before its second call of the first step."""
    left = threading.Barrier(2)

    def work(group: SharedGroup) -> torch.Tensor:
        group.begin(0)
        if group.rank == 1:
            group.all_reduce(torch.ones(4))
            group.abort()
        else:
            with pytest.raises(GroupBroken):
                group.all_reduce(torch.ones(4))
                group.all_gather(torch.ones(4))
        left.wait(20)
        group.begin(1)
        return group.all_reduce(torch.full((2,), group.rank + 1.0))

    assert all(torch.equal(found, torch.full((2,), 3.0)) for found in on_ranks(2, work))


def test_a_rank_that_is_late_ends_the_group_for_all() -> None:
    asked = threading.Event()

    def work(group: SharedGroup) -> None:
        if group.rank == 2:
            assert asked.wait(20)
        try:
            group.all_reduce(torch.ones(1))
        finally:
            asked.set()

    found = failures(3, work, patience_s=0.05)
    assert all(error is not None for error in found)
    assert {error.fields["failure"] for error in found if error} <= {"late", "aborted"}
    assert found[0] is not None and found[0].fields["rank"] == "2"


@pytest.mark.parametrize(
    "other",
    [
        lambda group: group.all_reduce(torch.ones(5)),
        lambda group: group.all_reduce(torch.ones(8, dtype=torch.bfloat16)),
        lambda group: group.all_gather(torch.ones(4)),
        lambda group: group.meet(),
    ],
)
def test_ranks_that_call_different_things_do_not_add_them_up(other: object) -> None:
    def work(group: SharedGroup) -> None:
        other(group) if group.rank else group.all_reduce(torch.ones(4))  # type: ignore[operator]

    found = failures(2, work)
    assert all(error is not None and error.fields["failure"] in ("differs", "aborted") for error in found)


_RANK = """
import sys, torch
from baton_engine.shared_group import SharedGroup
from baton_memory import SharedMemory
import os
fd = int(sys.argv[1])
group = SharedGroup(SharedMemory.open(fd, os.fstat(fd).st_size), 1, 2, patience_s=20)
group.meet()
print(float(group.all_reduce(torch.ones(3)).sum()), flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_ends_the_call_that_waits_for_it() -> None:
    with make_memory(2) as memory:
        other = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(memory.fd)],
            pass_fds=(memory.fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            group = SharedGroup(SharedMemory.open(os.dup(memory.fd), memory.length), 0, 2, patience_s=20)
            group.meet()
            assert torch.equal(group.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
            assert other.stdout is not None and other.stdout.readline() == b"6.0\n"
            killer = threading.Timer(0.0, other.send_signal, (signal.SIGKILL,))
            began = time.monotonic()
            killer.start()
            with pytest.raises(GroupBroken, match="rank 1 is gone"):
                group.all_reduce(torch.ones(3))
            assert time.monotonic() - began < 5
        finally:
            other.kill()
            other.communicate()
