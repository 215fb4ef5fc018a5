"""A worker's engines and their ranks: what each of them is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from baton_engine.messages import EngineSpec


def engine_specs(spec: EngineSpec, data_parallel: int) -> list[EngineSpec]:
    """The specs of `data_parallel` engines of one worker that `spec` describes, in order of data-parallel rank.

    CPUs and threads are shared out as `rank_specs` does it. The budget of the cache is each rank's own.
    """
    shares, own = _share(spec.cpus, data_parallel)
    threads = max(1, spec.threads // data_parallel)
    return [
        msgspec.structs.replace(
            spec, dp_rank=number, data_parallel=data_parallel, cpus=share, own_cpus=own, threads=threads
        )
        for number, share in enumerate(shares)
    ]


def rank_specs(spec: EngineSpec) -> list[EngineSpec]:
    """The specs of the ranks of the engine that `spec` describes, in order of rank.

    CPUs are shared out if there is one for each; otherwise all run on all of them. Threads are divided, and everybody
    has one at least. The budget of the cache is each rank's own.
    """
    shares, own = _share(spec.cpus, spec.ranks)
    threads = max(1, spec.threads // spec.ranks)
    return [
        msgspec.structs.replace(spec, rank=rank, cpus=share, own_cpus=own and spec.own_cpus, threads=threads)
        for rank, share in enumerate(shares)
    ]


def _share(cpus: Sequence[int], count: int) -> tuple[list[tuple[int, ...]], bool]:
    """The CPUs of each of `count`, and whether nobody else has them."""
    if len(cpus) < count:
        return [tuple(cpus)] * count, count == 1
    bounds = [len(cpus) * number // count for number in range(count + 1)]
    return [tuple(cpus[first:last]) for first, last in pairwise(bounds)], True
