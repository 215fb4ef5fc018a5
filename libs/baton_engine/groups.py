"""Where a rank's group comes from."""

from __future__ import annotations

import os

import torch

from baton_engine.errors import SpecInvalid
from baton_engine.messages import EngineSpec
from baton_engine.place import gpu_of
from baton_engine.shared_group import SharedGroup
from baton_memory import SharedMemory
from baton_model.parallel import RankGroup, Solo

# How long a rank waits awake, if it has a CPU of its own: a sum of one row of 576 over two ranks takes 1 to 2 us when
# it does, and 15 to 17 when it sleeps at once (medians, one core each).
SPIN_US = 20


def make_group(spec: EngineSpec, memory_fd: int | None) -> RankGroup:
    """The group of the rank that `spec` is about.

    `memory_fd`: descriptor of what all ranks share, from `group_memory.open_group`; None for a single rank.
    Raises SpecInvalid, baton_memory's MemoryInvalid.
    """
    if spec.ranks == 1:
        return Solo()
    if memory_fd is None:
        raise SpecInvalid(f"ranks is {spec.ranks}, and no memory was given that they share", ranks=spec.ranks)
    if spec.device == "cuda":
        from baton_engine.distributed_group import DistributedGroup

        device = torch.device("cuda", gpu_of(spec))
        return DistributedGroup(memory_fd, spec.rank, spec.ranks, device=device, patience_s=spec.patience_s)
    memory = SharedMemory.open(memory_fd, os.fstat(memory_fd).st_size)
    spin_us = SPIN_US if spec.own_cpus else 0
    return SharedGroup(memory, spec.rank, spec.ranks, patience_s=spec.patience_s, spin_us=spin_us)
