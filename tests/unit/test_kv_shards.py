"""Which rank holds which heads."""

from __future__ import annotations

import pytest

from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import PageLayout
from baton_kv.shards import ShardingImpossible, ShardMap, head_slices


def test_uneven_splits_give_the_first_ranks_one_head_more() -> None:
    assert head_slices(3, 2) == [range(2), range(2, 3)]
    assert head_slices(8, 3) == [range(3), range(3, 6), range(6, 8)]


def test_more_ranks_than_heads_share_a_head_with_their_neighbours() -> None:
    assert head_slices(2, 4) == [range(1), range(1), range(1, 2), range(1, 2)]


@pytest.mark.parametrize("kv_heads", range(1, 17))
@pytest.mark.parametrize("tp", range(1, 9))
def test_every_replica_set_holds_every_head_once(kv_heads: int, tp: int) -> None:
    if tp > kv_heads and tp % kv_heads:
        with pytest.raises(ShardingImpossible) as refused:
            head_slices(kv_heads, tp)
        assert refused.value.fields == {"kv_heads": str(kv_heads), "tp": str(tp)}
        return
    shards = ShardMap(kv_heads, tp)
    sets = shards.replica_sets(0)
    assert len(sets) == shards.replicas
    assert sorted(rank for ranks in sets for rank in ranks) == list(range(tp))
    for ranks in sets:
        assert [head for rank in ranks for head in shards.heads_of(rank)] == list(range(kv_heads))
    sizes = [len(heads) for heads in shards.slices()]
    assert max(sizes) - min(sizes) <= 1


def test_data_parallel_ranks_have_ranks_of_their_own() -> None:
    shards = ShardMap(kv_heads_total=2, tp=4, dp=2)
    assert shards.ranks == 8
    assert shards.replica_sets(1) == [(4, 6), (5, 7)]
    assert [shards.heads_of(rank) for rank in (0, 3, 4, 7)] == [range(1), range(1, 2), range(1), range(1, 2)]


def test_a_latent_cache_is_on_every_rank() -> None:
    shards = ShardMap(kv_heads_total=1, tp=3, dp=2, mla=True)
    assert shards.replica_sets(1) == [(3,), (4,), (5,)]


def test_a_ranks_layout_has_its_own_heads() -> None:
    shards = ShardMap(kv_heads_total=3, tp=2)
    model = PageLayout("HND", layers=2, pages=4, page_size=16, kv_heads=3, head_dim=64, element_size=2)
    assert [shards.layout_of(rank, model).kv_heads for rank in (0, 1)] == [2, 1]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidKvArgument):
        ShardMap(0, 1)
    with pytest.raises(InvalidKvArgument):
        ShardMap(2, 0)
    with pytest.raises(InvalidKvArgument):
        ShardMap(2, 1, dp=0)
    with pytest.raises(InvalidKvArgument):
        ShardMap(2, 1).replica_sets(1)
    with pytest.raises(InvalidKvArgument):
        ShardMap(2, 1).heads_of(1)
