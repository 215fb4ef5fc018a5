"""Write plans against brute force: the bytes that arrive are those that the destination would have made itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import ceil, gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import Order, PageLayout
from baton_kv.plan import (
    LayoutMismatch,
    PairPlan,
    chunk_pages,
    expected_extents,
    pages_to_transfer,
    plan_pairs,
)
from baton_kv.regions import RegionMap
from baton_kv.shards import ShardMap
from baton_kv.streams import page_copies, plan_streams

LAYERS, PAGE_SIZE, HEAD_DIM = 2, 3, 2
SOURCE_PAGES, DESTINATION_PAGES = [4, 0, 1], [2, 3, 0]


def shardings(ranks: int, heads: int, *, mla: bool = False, dps: range = range(1, 2)) -> list[ShardMap]:
    legal = [tp for tp in range(1, ranks + 1) if mla or tp <= heads or tp % heads == 0]
    return [ShardMap(heads, tp, dp, mla) for tp, dp in product(legal, dps) if tp * dp <= ranks]


def layout(order: Order, pages: int) -> PageLayout:
    return PageLayout(order, LAYERS, pages, PAGE_SIZE, kv_heads=1, head_dim=HEAD_DIM, element_size=2)


def model_cache(order: Order, heads: int) -> np.ndarray:
    """The cache of an unsharded model for the pages of one request: uint16 [layers, pages, page], all different."""
    whole = replace(layout(order, len(SOURCE_PAGES)), kv_heads=heads)
    return np.arange(1, np.prod(whole.shape) + 1, dtype=np.uint16).reshape(whole.shape)


def rank_region(cache: np.ndarray, order: Order, heads: range, pages: int, places: list[int]) -> np.ndarray:
    """What a rank that computed the request itself has in its region."""
    part = {"HND": np.s_[:, :, :, heads.start : heads.stop], "NHD": np.s_[..., heads.start : heads.stop, :]}
    own = cache if order == "MLA" else cache[part[order]]
    region = np.zeros((LAYERS, pages, *own.shape[2:]), dtype=np.uint16)
    region[:, places] = own
    return region


def carry_out(pairs: list[PairPlan], sources: dict[int, np.ndarray], regions: dict[int, np.ndarray]) -> None:
    """Copies all extents, each byte of a destination at most once."""
    touched = {rank: np.zeros(region.nbytes, dtype=np.uint8) for rank, region in regions.items()}
    whole = [RegionMap.whole(LAYERS)] * (max([*sources, *regions]) + 1)
    for pair in plan_streams(pairs, whole, whole):
        copies = page_copies(pair, SOURCE_PAGES, DESTINATION_PAGES)
        within = np.arange(copies[0, 2])
        assert (copies[:, 2] == len(within)).all()
        source = sources[pair.source_rank].reshape(-1).view(np.uint8)
        destination = regions[pair.destination_rank].reshape(-1).view(np.uint8)
        places = copies[:, 1, None] + within
        np.add.at(touched[pair.destination_rank], places, 1)
        destination[places] = source[copies[:, 0, None] + within]
    assert all(counts.max() == 1 for counts in touched.values())


def check(order: Order, heads: int, source: ShardMap, destination: ShardMap, seed: int) -> None:
    cache = model_cache(order, heads)
    source_dp, dp = seed % source.dp, seed % destination.dp
    pairs = plan_pairs(
        source,
        destination,
        layout(order, 5),
        layout(order, 4),
        dp_rank=dp,
        seed=seed,
        source_dp_rank=source_dp,
    )
    sources = {
        rank: rank_region(cache, order, source.heads_of(rank), 5, SOURCE_PAGES)
        for rank in range(source_dp * source.tp, (source_dp + 1) * source.tp)
    }
    wanted = {
        rank: rank_region(cache, order, destination.heads_of(rank), 4, DESTINATION_PAGES)
        for rank in range(dp * destination.tp, (dp + 1) * destination.tp)
    }
    regions = {rank: np.zeros_like(region) for rank, region in wanted.items()}
    carry_out(pairs, sources, regions)
    for rank, region in wanted.items():
        assert (regions[rank] == region).all(), (order, heads, source, destination, rank)
    arriving = sum(len(pair.extents) for pair in pairs) * LAYERS * len(SOURCE_PAGES)
    assert arriving == expected_extents(
        source,
        destination,
        order,
        prompt_tokens=len(SOURCE_PAGES) * PAGE_SIZE + 1,
        prefix_tokens=0,
        page_size=PAGE_SIZE,
        layers=LAYERS,
    )


@pytest.mark.parametrize("heads", range(1, 17))
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_every_pair_of_tensor_parallel_sizes(order: Order, heads: int) -> None:
    for seed, (source, destination) in enumerate(product(shardings(8, heads), repeat=2)):
        check(order, heads, source, destination, seed)


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_every_pair_of_data_parallel_sizes(heads: int) -> None:
    for seed, (source, destination) in enumerate(product(shardings(8, heads, dps=range(1, 9)), repeat=2)):
        check("HND", heads, source, destination, seed)


def test_every_latent_pair() -> None:
    for seed, (source, destination) in enumerate(product(shardings(8, 1, mla=True, dps=range(1, 9)), repeat=2)):
        check("MLA", 1, source, destination, seed)


def test_every_destination_set_is_fed_by_one_source_set() -> None:
    for source, destination in product(shardings(8, 2), repeat=2):
        for seed in range(8):
            pairs = plan_pairs(source, destination, layout("HND", 1), layout("HND", 1), dp_rank=0, seed=seed)
            for ranks in destination.replica_sets(0):
                senders = {pair.source_rank for pair in pairs if pair.destination_rank in ranks}
                assert senders in [set(members) for members in source.replica_sets(0)]


@pytest.mark.parametrize("start", [0, 1, 12345, 2**64 - 500])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 4)])
def test_a_thousand_latent_transfers_use_all_source_ranks_alike(start: int, stride: int, tp: int, dp: int) -> None:
    source, destination = ShardMap(1, 4, mla=True), ShardMap(1, tp, dp, mla=True)
    sent = Counter(
        pair.source_rank
        for number, seed in enumerate(range(start, start + 1000 * stride, stride))
        for pair in plan_pairs(source, destination, layout("MLA", 1), layout("MLA", 1), number % dp, seed)
    )
    assert all(225 * tp <= sent[rank] <= 275 * tp for rank in range(4)), sent


def test_one_transfer_into_several_replica_sets_uses_several_sources() -> None:
    both = ShardMap(1, 4, mla=True)
    pairs = plan_pairs(both, both, layout("MLA", 1), layout("MLA", 1), dp_rank=0, seed=9)
    assert sorted(pair.source_rank for pair in pairs) == [0, 1, 2, 3]


def test_extents_of_a_page_by_order_and_sharding() -> None:
    def extents(order: Order, source_tp: int, destination_tp: int) -> list[int]:
        pairs = plan_pairs(
            ShardMap(4, source_tp), ShardMap(4, destination_tp), layout(order, 1), layout(order, 1), dp_rank=0, seed=0
        )
        return [len(pair.extents) for pair in pairs]

    assert extents("HND", 2, 2) == extents("NHD", 2, 2) == [1, 1]
    assert extents("HND", 2, 4) == [2] * 4
    assert extents("NHD", 2, 4) == [2 * PAGE_SIZE] * 4
    assert extents("HND", 2, 3) == [1, 2, 2]


@pytest.mark.parametrize("heads", range(1, 17))
def test_the_expected_count_is_the_documents_formula(heads: int) -> None:
    layers, p, tokens, prefix, tails = 5, 4, 31, 8, 2
    pages = ceil((tokens - 1) / p) - prefix // p
    for source, destination in product(shardings(8, heads), repeat=2):
        a, b = min(source.tp, heads), min(destination.tp, heads)
        if heads % a or heads % b:
            continue  # the formula with gcd holds for even splits
        per_page = a if a == b else 2 * (a + b - gcd(a, b))
        assert (
            expected_extents(
                source,
                destination,
                "HND",
                prompt_tokens=tokens,
                prefix_tokens=prefix,
                page_size=p,
                layers=layers,
                tail_buffers=tails,
            )
            == destination.tp // b * layers * pages * per_page + tails * destination.tp
        )


def test_nothing_to_move_means_nothing_to_wait_for() -> None:
    one = ShardMap(2, 1)
    for tokens, prefix in ((1, 0), (17, 16), (16, 16)):
        assert pages_to_transfer(tokens, prefix, 16) == 0
        assert (
            expected_extents(
                one, one, "HND", prompt_tokens=tokens, prefix_tokens=prefix, page_size=16, layers=3, tail_buffers=1
            )
            == 0
        )


def test_pages_around_the_page_size() -> None:
    assert [pages_to_transfer(tokens, 0, 16) for tokens in (1, 2, 15, 16, 17, 18, 80, 81, 82)] == [
        0, 1, 1, 1, 1, 2, 5, 5, 6,
    ]  # fmt: skip
    assert pages_to_transfer(5, 5, 1) == 0


@given(st.data())
def test_chunks_complete_each_page_exactly_once(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 9))
    tokens = data.draw(st.integers(1, 60))
    prefix = data.draw(st.integers(0, tokens // page_size)) * page_size
    first = data.draw(st.integers(0, min(prefix, tokens - 1)))
    cuts = data.draw(st.sets(st.integers(first, tokens - 1), max_size=8))
    written: list[int] = []
    for start, end in pairwise(sorted({first, *cuts, tokens - 1})):
        positions = chunk_pages(tokens, prefix, page_size, start, end)
        for position in positions:
            computed = min((prefix // page_size + position + 1) * page_size, tokens - 1)
            assert start < computed <= end
        written += positions
    if first < tokens - 1:
        assert written == list(range(pages_to_transfer(tokens, prefix, page_size)))


def test_a_chunk_that_ends_inside_a_page_leaves_it_to_the_next() -> None:
    assert chunk_pages(20, 0, 4, 0, 6) == range(1)
    assert chunk_pages(20, 0, 4, 6, 12) == range(1, 3)
    assert chunk_pages(20, 0, 4, 12, 19) == range(3, 5)
    assert chunk_pages(20, 8, 4, 8, 19) == range(3)


@pytest.mark.parametrize(
    ("tokens", "prefix", "page_size", "start", "end"),
    [
        (0, 0, 4, 0, 0),
        (8, 3, 4, 0, 7),
        (8, 12, 4, 0, 7),
        (8, 0, 0, 0, 7),
        (8, 0, 4, 0, 8),
        (8, 0, 4, 5, 4),
        (8, 0, 4, -1, 4),
    ],
)
def test_impossible_chunks_are_refused(tokens: int, prefix: int, page_size: int, start: int, end: int) -> None:
    with pytest.raises(InvalidKvArgument):
        chunk_pages(tokens, prefix, page_size, start, end)


@pytest.mark.parametrize(
    "changes", [{"order": "NHD"}, {"layers": 9}, {"page_size": 5}, {"head_dim": 9}, {"element_size": 9}]
)
def test_caches_that_differ_are_refused(changes: dict[str, object]) -> None:
    ours, one = layout("HND", 4), ShardMap(1, 1)
    with pytest.raises(LayoutMismatch) as refused:
        plan_pairs(one, one, ours, replace(ours, **changes), dp_rank=0, seed=0)
    assert refused.value.fields["field"] == next(iter(changes))
    assert refused.value.status == "FAILED_PRECONDITION"


def test_maps_that_differ_are_refused() -> None:
    page = layout("HND", 4)
    for source, destination in (
        (ShardMap(2, 1), ShardMap(4, 1)),
        (ShardMap(1, 1), ShardMap(1, 1, mla=True)),
        (ShardMap(1, 1, mla=True), ShardMap(1, 1, mla=True)),
    ):
        with pytest.raises(LayoutMismatch):
            plan_pairs(source, destination, page, page, dp_rank=0, seed=0)
