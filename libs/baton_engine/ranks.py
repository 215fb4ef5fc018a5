"""One engine's ranks: what each of them is told. Pure."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from baton_engine.messages import EngineSpec


def rank_specs(spec: EngineSpec) -> list[EngineSpec]:
    """The specs of the ranks of the engine that `spec` describes, in order of rank.

    CPUs are shared out if there is one for each rank; otherwise all ranks run on all of them. Threads are divided, and
    every rank has one at least. The budget of the cache is each rank's own.
    """
    ranks, cpus = spec.ranks, spec.cpus
    own = len(cpus) >= ranks
    bounds = [len(cpus) * rank // ranks for rank in range(ranks + 1)]
    shares = [cpus[first:last] for first, last in pairwise(bounds)] if own else [cpus] * ranks
    return [
        msgspec.structs.replace(
            spec, rank=rank, cpus=share, own_cpus=own or ranks == 1, threads=max(1, spec.threads // ranks)
        )
        for rank, share in enumerate(shares)
    ]
