"""Streams of some layers only, and pages of one side that are parts of the other's: bytes, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from baton_fabric._native import InboxFull, TransferDone
from baton_fabric.engine import Placement
from baton_fabric.errors import FabricError
from fabric_harness import Pair, fabrics, pair

PROVIDERS = fabrics("tcp", "shm", "local")
LAYERS, PAGES, PAGE = 4, 64, 4096


@pytest.fixture(scope="module", params=PROVIDERS)
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(request.param, layers=LAYERS, pages=PAGES, page_bytes=PAGE) as both:
        both.sender.fill()
        yield both


def move(both: Pair, source: list[int], destination: list[int], streams: list[Any], extents: int) -> Any:
    """The statistics of one transfer of one step."""
    both.receiver.bytes[:] = 0
    step = both.sender.layer_counter.value() // LAYERS
    transfer = both.open(source, destination, streams=streams, expected=extents)
    both.sender.engine.submit_chunks([(transfer, step * LAYERS, 0, len(source), True)])
    both.run_step(step)
    (done,) = both.sender.wait(TransferDone)
    (full,) = both.receiver.wait(InboxFull)
    both.receiver.engine.close_inbox(full.slot, full.generation)
    assert full.extents == done.stats.extents == extents
    return done.stats


def placed(both: Pair, extents: list[tuple[int, int, int]], placement: Placement) -> tuple[Any, ...]:
    return (*both.stream(*extents), placement)


@pytest.mark.parametrize("larger", ["source", "destination"])
def test_latent_pages_of_one_side_are_thirds_of_the_others(both: Pair, larger: str) -> None:
    """Tokens of a latent page follow each other: parts do too, and leave as one write."""
    parts, part = 3, PAGE // 3 // 2 * 2
    small, large = [9, 10, 11, 30], [3 * 7, 3 * 7 + 1, 3 * 7 + 2, 3 * 40]
    grid = {"source_parts": parts, "source_part_stride": part}
    if larger == "destination":
        grid = {"remote_parts": parts, "remote_part_stride": part}
    stream = placed(both, [(0, 0, part)], Placement(0, LAYERS, **grid))
    source, destination = (large, small) if larger == "source" else (small, large)
    stats = move(both, source, destination, [stream], len(small) * LAYERS)
    expected = np.zeros_like(both.receiver.bytes)
    for ours, theirs in zip(small, large, strict=True):
        inside = np.s_[:, theirs // 3, theirs % 3 * part : (theirs % 3 + 1) * part]
        if larger == "source":
            expected[:, ours, :part] = both.sender.bytes[inside]
        else:
            expected[inside] = both.sender.bytes[:, ours, :part]
    assert (both.receiver.bytes == expected).all()
    assert stats.pages == len(small)


def test_parts_that_follow_each_other_on_both_sides_leave_as_one_write(both: Pair) -> None:
    half = PAGE // 2
    whole = placed(both, [(0, 0, half)], Placement(0, LAYERS, 2, half, 2, half))
    stats = move(both, list(range(8)), list(range(20, 28)), [whole], 8 * LAYERS)
    assert stats.writes == LAYERS
    assert (both.receiver.bytes[:, 10:14] == both.sender.bytes[:, :4]).all()


def test_regions_that_hold_some_layers_each(both: Pair) -> None:
    """Source layers in one region, destination layers 0 and 1 to 3 in two (here: two places of one)."""
    layer = PAGES * PAGE
    first = placed(both, [(0, 3 * layer, PAGE)], Placement(0, 1))
    others = placed(both, [(layer, 0, PAGE)], Placement(1, 3))
    move(both, [5, 6, 9], [1, 2, 3], [others, first], 3 * LAYERS)
    assert (both.receiver.bytes[3, 1:4] == both.sender.bytes[0, [5, 6, 9]]).all()
    assert (both.receiver.bytes[:3, 1:4] == both.sender.bytes[1:, [5, 6, 9]]).all()
    assert not both.receiver.bytes[:, 4:].any()


def test_a_layer_without_a_stream_is_refused(both: Pair) -> None:
    with pytest.raises(FabricError, match="layer 2"):
        both.open(
            [0],
            [0],
            streams=[
                placed(both, [(0, 0, PAGE)], Placement(0, 2)),
                placed(both, [(0, 0, PAGE)], Placement(3, 1)),
            ],
            slot=1,
        )


@pytest.mark.parametrize(
    "placement",
    [Placement(0, LAYERS + 1), Placement(LAYERS, 1), Placement(0, 0), Placement(0, LAYERS, 0), Placement(1, LAYERS)],
)
def test_impossible_placements_are_refused(both: Pair, placement: Placement) -> None:
    with pytest.raises(FabricError) as refused:
        both.open([0], [0], streams=[placed(both, [(0, 0, PAGE)], placement)], slot=1)
    assert refused.value.reason == "BAD_ARGUMENT"


@pytest.mark.parametrize("side", ["source", "destination"])
def test_parts_beyond_a_region_are_refused(both: Pair, side: str) -> None:
    half = PAGE // 2
    inside, outside = 2 * PAGES - 1, 2 * PAGES
    placement = Placement(0, LAYERS, 2, half) if side == "source" else Placement(0, LAYERS, 1, 0, 2, half)
    stream = placed(both, [(0, 0, half)], placement)

    def open_one(number: int) -> None:
        pages = ([number], [0]) if side == "source" else ([0], [number])
        both.open(*pages, streams=[stream], slot=1)

    with pytest.raises(FabricError) as refused:
        open_one(outside)
    assert refused.value.reason == "OUT_OF_BOUNDS"
    assert refused.value.fields["side"] == side
    open_one(inside)
    both.sender.engine.cancel_transfer(both._transfers)
