"""Caches of different page sizes, and over several regions, against brute force: every token is where it belongs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import Order, PageLayout
from baton_kv.plan import (
    LayoutMismatch,
    chunk_pages,
    common_page_size,
    expected_extents,
    pages_to_transfer,
    plan_pairs,
)
from baton_kv.regions import LayerRun, RegionMap, RegionsMismatch
from baton_kv.shards import ShardMap
from baton_kv.streams import StreamPlan, number_pages, page_copies, plan_streams
from kv_sides import DIM, Side, tokens_of


def carry_out(stream: StreamPlan, source: Side, destination: Side, numbers: tuple[list[int], list[int]]) -> int:
    """Copies the stream's bytes -> its extents."""
    copies = page_copies(stream, *numbers)
    ours = source.regions[stream.source_rank][stream.source_region].reshape(-1).view(np.uint8)
    theirs = destination.regions[stream.destination_rank][stream.destination_region].reshape(-1).view(np.uint8)
    for start, target, length in copies.tolist():
        assert 0 <= start <= len(ours) - length
        assert 0 <= target <= len(theirs) - length
        assert not theirs[target : target + length].any(), "written twice"
        theirs[target : target + length] = ours[start : start + length]
    return len(copies)


def spread(count: int, seed: int, total: int) -> list[int]:
    return np.random.default_rng(seed).permutation(total)[:count].tolist()


def check(
    order: Order,
    sizes: tuple[int, int],
    heads: int,
    shards: tuple[ShardMap, ShardMap],
    prompt: int,
    prefix: int,
    splits: tuple[list[int], list[int]] = ([2], [2]),
    cuts: tuple[int, ...] = (),
    seed: int = 0,
) -> None:
    """Tokens [prefix, prompt - 1), computed in chunks at the source, end up as if computed at the destination."""
    layers, done = sum(splits[0]), prompt - 1
    values = tokens_of(layers, prompt, heads)
    layouts = [PageLayout(order, layers, 30, size, 1, DIM, 2) for size in sizes]
    source = Side(layouts[0], shards[0], spread(-(-prompt // sizes[0]), seed, 30), splits[0])
    skipped = prefix // sizes[1]
    destination = Side(layouts[1], shards[1], spread(-(-done // sizes[1]) - skipped, seed + 1, 30), splits[1])
    wanted = Side(destination.layout, shards[1], destination.pages, splits[1])

    dp_rank = seed % shards[1].dp
    pairs = plan_pairs(*shards, *layouts, dp_rank=dp_rank, seed=seed)
    streams = plan_streams(pairs, [source.map] * shards[0].ranks, [destination.map] * shards[1].ranks)
    size = common_page_size(*sizes)
    count = pages_to_transfer(prompt, prefix, size)
    first = prefix // sizes[0]
    last = -(-done // sizes[0]) if count else first
    numbers = number_pages(source.pages[first:last], destination.pages, *sizes, prefix_tokens=prefix)
    assert len(numbers[0]) == len(numbers[1]) == count

    arrived, computed, positions = 0, 0, Counter[int]()
    for start, end in pairwise(sorted({0, done, *cuts})):
        source.compute(values, 0, computed, end)
        computed = end
        chunk = chunk_pages(prompt, prefix, size, start, end)
        positions.update(chunk)
        part = tuple(side[chunk.start : chunk.stop] for side in numbers)
        arrived += sum(carry_out(stream, source, destination, part) for stream in streams)
    assert positions == Counter(range(count))

    wanted.compute(values, dp_rank, prefix, done, skipped)
    assert destination.holds_the_same(wanted)
    assert arrived == expected_extents(
        *shards,
        order,
        prompt_tokens=prompt,
        prefix_tokens=prefix,
        page_size=sizes[1],
        source_page_size=sizes[0],
        layers=layers,
    )


SIZES = [(2, 4), (4, 2), (1, 3), (6, 2), (3, 3)]


def legal(heads: int, ranks: int, *, mla: bool = False) -> list[ShardMap]:
    return [ShardMap(heads, tp, 1, mla) for tp in range(1, ranks + 1) if mla or tp <= heads or tp % heads == 0]


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_of_shardings_between_page_sizes(order: Order, sizes: tuple[int, int]) -> None:
    for heads in (1, 2, 3, 4):
        for seed, shards in enumerate(product(legal(heads, 4), repeat=2)):
            check(order, sizes, heads, shards, prompt=12, prefix=0, cuts=(5, 7), seed=seed)


@pytest.mark.parametrize("sizes", SIZES)
def test_latent_caches_between_page_sizes(sizes: tuple[int, int]) -> None:
    for seed, shards in enumerate(product(legal(1, 4, mla=True), repeat=2)):
        check("MLA", sizes, 1, shards, prompt=14, prefix=0, cuts=(6,), seed=seed)


@given(st.data())
@settings(max_examples=120)
def test_any_prompt_prefix_chunks_and_regions(data: st.DataObject) -> None:
    order: Order = data.draw(st.sampled_from(["HND", "NHD", "MLA"]))
    mla = order == "MLA"
    smaller, factor = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.permutations([smaller, smaller * factor]))
    heads = 1 if mla else data.draw(st.integers(1, 4))
    maps = st.sampled_from(legal(heads, 3, mla=mla))
    destination = replace(data.draw(maps), dp=data.draw(st.integers(1, 2)))
    prompt = data.draw(st.integers(2, 25))
    prefix = data.draw(st.integers(0, (prompt - 1) // sizes[1])) * sizes[1]
    cuts = tuple(data.draw(st.sets(st.integers(1, prompt - 1), max_size=3)))
    splits = st.sampled_from([[3], [1, 2], [2, 1], [1, 1, 1]])
    check(
        order,
        (sizes[0], sizes[1]),
        heads,
        (data.draw(maps), destination),
        prompt,
        prefix,
        (data.draw(splits), data.draw(splits)),
        cuts,
        data.draw(st.integers(0, 100)),
    )


def test_a_prefix_that_ends_inside_a_source_page() -> None:
    """Destination pages of 2 tokens, source pages of 6: the first source page gives its last part only."""
    one = ShardMap(2, 1)
    check("HND", (6, 2), 2, (one, one), prompt=12, prefix=4)
    assert number_pages([7, 3], [9, 8, 5], 6, 2, prefix_tokens=4) == ([7 * 3 + 2, 9, 10], [9, 8, 5])


def test_pages_of_one_size_keep_their_numbers() -> None:
    source, destination = [3, 1, 2], [6, 5, 4]
    ours, theirs = number_pages(source, destination, 16, 16, prefix_tokens=32)
    assert ours is source
    assert theirs is destination


def test_extents_of_a_smaller_page() -> None:
    def extents(order: Order, source_tp: int, destination_tp: int) -> list[int]:
        mla = order == "MLA"
        heads = 1 if mla else 4
        pairs = plan_pairs(
            ShardMap(heads, source_tp, mla=mla),
            ShardMap(heads, destination_tp, mla=mla),
            PageLayout(order, 1, 8, 4, 1, DIM, 2),
            PageLayout(order, 1, 8, 8, 1, DIM, 2),
            dp_rank=0,
            seed=0,
        )
        return [len(pair.extents) for pair in pairs]

    assert extents("HND", 2, 2) == [4, 4]  # K and V of each head
    assert extents("NHD", 2, 2) == [2, 2]  # K and V
    assert extents("NHD", 2, 1) == [8, 8]  # K and V of each token
    assert extents("MLA", 1, 1) == [1]


def test_latent_parts_follow_each_other_in_a_page() -> None:
    """So they coalesce: a run of small pages into one large page is one piece of bytes on both sides."""
    one = ShardMap(1, 1, mla=True)
    small, large = (PageLayout("MLA", 1, 16, size, 1, DIM, 2) for size in (4, 16))
    pairs = plan_pairs(one, one, small, large, dp_rank=0, seed=0)
    (stream,) = plan_streams(pairs, [RegionMap.whole(1)], [RegionMap.whole(1)])
    copies = page_copies(stream, *number_pages([8, 9, 10, 11], [3], 4, 16))
    for left, right in pairwise(copies.tolist()):
        assert (left[0] + left[2], left[1] + left[2]) == (right[0], right[1])


@pytest.mark.parametrize(
    ("source", "destination", "sizes", "prefix"),
    [
        ([1, 2], [1, 2], (2, 4), 0),
        ([1, 2, 3], [1], (2, 4), 0),
        ([1], [1, 2, 3], (4, 2), 0),
        ([1], [1, 2], (4, 2), 2),
        ([1, 2], [1], (2, 2), 0),
        ([], [1], (4, 2), 0),
        ([1], [1], (2, 4), 2),
    ],
)
def test_lists_that_do_not_go_together_are_refused(
    source: list[int], destination: list[int], sizes: tuple[int, int], prefix: int
) -> None:
    with pytest.raises(InvalidKvArgument):
        number_pages(source, destination, *sizes, prefix_tokens=prefix)


def test_a_page_of_the_other_side_may_have_more_parts_than_fit_in_memory() -> None:
    """2^60 numbers are never made for the three that count."""
    assert number_pages([5, 3, 4], [1], 4, 4 << 60) == ([5, 3, 4], [1 << 60, (1 << 60) + 1, (1 << 60) + 2])


def test_page_sizes_that_do_not_divide_each_other_are_refused() -> None:
    for refused in (
        lambda: common_page_size(4, 6),
        lambda: number_pages([1], [1], 6, 4),
        lambda: expected_extents(
            ShardMap(1, 1),
            ShardMap(1, 1),
            "HND",
            prompt_tokens=9,
            prefix_tokens=0,
            page_size=4,
            source_page_size=6,
            layers=1,
        ),
    ):
        with pytest.raises(LayoutMismatch) as mismatch:
            refused()
        assert mismatch.value.fields["field"] == "page_size"


def test_a_region_may_hold_several_runs_of_layers() -> None:
    layout = PageLayout("HND", 4, 3, 2, 1, DIM, 2)
    swapped = RegionMap(
        (LayerRun(0, 0, 1, layout.layer_bytes), LayerRun(1, 1, 1), LayerRun(0, 2, 1), LayerRun(1, 3, 1, 4096))
    )
    swapped.check(layout, [2 * layout.layer_bytes, 4096 + layout.layer_bytes])
    one = ShardMap(1, 1)
    pairs = plan_pairs(one, one, layout, layout, dp_rank=0, seed=0)
    streams = plan_streams(pairs, [swapped], [RegionMap.whole(4)])
    assert [(s.source_region, s.first_layer, s.layers) for s in streams] == [(0, 0, 1), (1, 1, 1), (0, 2, 1), (1, 3, 1)]
    assert [page_copies(s, [1], [2])[0, 0] for s in streams] == [
        layout.layer_bytes + layout.page_bytes,
        layout.page_bytes,
        layout.page_bytes,
        4096 + layout.page_bytes,
    ]
    assert [page_copies(s, [1], [2])[0, 1] for s in streams] == [
        layer * layout.layer_bytes + 2 * layout.page_bytes for layer in range(4)
    ]


@pytest.mark.parametrize(
    "runs",
    [
        (LayerRun(0, 1, 2),),
        (LayerRun(0, 0, 0),),
        (LayerRun(0, 0, 2), LayerRun(1, 1, 2)),
        (LayerRun(0, 0, 1), LayerRun(1, 2, 1)),
        (LayerRun(-1, 0, 1),),
        (LayerRun(0, 0, 1, -8),),
    ],
)
def test_maps_with_gaps_or_overlaps_are_refused(runs: tuple[LayerRun, ...]) -> None:
    with pytest.raises(RegionsMismatch):
        RegionMap(runs)


def test_maps_that_do_not_fit_the_cache_are_refused() -> None:
    layout = PageLayout("HND", 3, 3, 2, 1, DIM, 2)
    size = layout.layer_bytes
    RegionMap.split([1, 2]).check(layout, [size, 2 * size])
    for regions, lengths in (
        (RegionMap.split([1, 1]), [size, size]),
        (RegionMap.split([1, 2]), [size, 2 * size - 1]),
        (RegionMap.split([1, 2]), [size, 2 * size, size]),
        (RegionMap.whole(3), [size, 2 * size]),
        (RegionMap((LayerRun(0, 0, 2), LayerRun(0, 2, 1, size))), [3 * size]),
    ):
        with pytest.raises(RegionsMismatch):
            regions.check(layout, lengths)
    with pytest.raises(InvalidKvArgument):
        one = ShardMap(1, 1)
        pairs = plan_pairs(one, one, layout, layout, dp_rank=0, seed=0)
        plan_streams(pairs, [RegionMap.whole(2)], [RegionMap.whole(3)])
