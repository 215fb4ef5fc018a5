"""What each rank of an engine is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.messages import EngineSpec
from baton_engine.ranks import rank_specs


@given(ranks=st.integers(1, 8), cpus=st.lists(st.integers(0, 63), unique=True, max_size=12), threads=st.integers(1, 16))
def test_cpus_are_shared_out_or_shared(ranks: int, cpus: list[int], threads: int) -> None:
    specs = rank_specs(EngineSpec(model_path="m", ranks=ranks, cpus=tuple(cpus), threads=threads))
    assert [spec.rank for spec in specs] == list(range(ranks))
    assert all(spec.threads == max(1, threads // ranks) for spec in specs)
    if len(cpus) >= ranks:
        assert [cpu for spec in specs for cpu in spec.cpus] == cpus and all(spec.cpus for spec in specs)
        assert max(len(spec.cpus) for spec in specs) - min(len(spec.cpus) for spec in specs) <= 1
    else:
        assert all(spec.cpus == tuple(cpus) for spec in specs)
    # Who shares a CPU with another rank must not wait awake for it.
    assert all(spec.own_cpus == (len(cpus) >= ranks or ranks == 1) for spec in specs)
