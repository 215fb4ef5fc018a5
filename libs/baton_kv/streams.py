"""A write plan in bytes of regions: what a fabric needs to know, for all pages and layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import InvalidKvArgument
from .layout import PageLayout
from .plan import Extent, PairPlan, common_page_size
from .regions import RegionMap


@dataclass(frozen=True, slots=True)
class PageGrid:
    """Where the pages of one side lie. A transfer numbers the smaller pages of its two sides; a page of the other side
    has `parts` of them: number n is part `n % parts` of page `n // parts`. Strides in bytes."""

    layer_stride: int
    page_stride: int
    parts: int = 1
    part_stride: int = 0

    def starts(self, layers: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte of each page in the region of `layers` layers: int64 `[layers, len(numbers)]`."""
        places = numbers // self.parts * self.page_stride + numbers % self.parts * self.part_stride
        return np.arange(layers, dtype=np.int64)[:, None] * self.layer_stride + places


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What one source region sends into one destination region: layers [first_layer, first_layer + layers).

    The regions count in their ranks' lists. Byte b of extent (s, d, length) of layer l of pages (m, n) lies at
    `(l - first_layer) * layer_stride + (place of the page in the grid) + s or d + b` of its region.
    """

    source_rank: int
    source_region: int
    destination_rank: int
    destination_region: int
    first_layer: int
    layers: int
    source: PageGrid
    destination: PageGrid
    extents: tuple[Extent, ...]


def plan_streams(
    pairs: Sequence[PairPlan],
    source_regions: Sequence[RegionMap],
    destination_regions: Sequence[RegionMap],
) -> list[StreamPlan]:
    """The pairs cut where a region of either side ends. `..._regions`: of each rank of the whole worker.

    Streams are in order of layers within a pair, and extents in order of source offset, so that neighbours follow each
    other and can leave as one write. Raises `InvalidKvArgument`.
    """
    streams: list[StreamPlan] = []
    for pair in pairs:
        ours, theirs = source_regions[pair.source_rank], destination_regions[pair.destination_rank]
        for regions, layout in ((ours, pair.source), (theirs, pair.destination)):
            if regions.layers != layout.layers:
                raise InvalidKvArgument(
                    f"the regions hold {regions.layers} layers; the cache has {layout.layers}", layers=regions.layers
                )
        source, destination = (_grid(layout, pair.page_size) for layout in (pair.source, pair.destination))
        for left in ours.runs:
            for right in theirs.runs:
                first, end = max(left.first_layer, right.first_layer), min(left.end, right.end)
                if first >= end:
                    continue
                # Where the stream's first layer begins in each region: 0, unless runs are cut or share a region.
                from_here = left.offset + (first - left.first_layer) * source.layer_stride
                to_there = right.offset + (first - right.first_layer) * destination.layer_stride
                streams.append(
                    StreamPlan(
                        pair.source_rank,
                        left.region,
                        pair.destination_rank,
                        right.region,
                        first,
                        end - first,
                        source,
                        destination,
                        tuple((from_here + s, to_there + d, length) for s, d, length in pair.extents),
                    )
                )
    return streams


def number_pages(
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    source_page_size: int,
    destination_page_size: int,
    prefix_tokens: int = 0,
) -> tuple[Sequence[int], Sequence[int]]:
    """The pages of a transfer as pairs of equal size: numbers of the smaller pages, one for one.

    Both lists are in the order of the prompt and start with the page that holds position `prefix_tokens` (whole pages
    that the destination has already). The side with the smaller pages says how many there are. With pages of one size
    the lists are what they were. Raises `InvalidKvArgument`, `LayoutMismatch`.
    """
    size = common_page_size(source_page_size, destination_page_size)
    if prefix_tokens % destination_page_size:
        raise InvalidKvArgument(
            f"prefix_tokens is {prefix_tokens}; it must be a multiple of the destination's page size, "
            f"{destination_page_size}",
            prefix_tokens=prefix_tokens,
        )
    if source_page_size > destination_page_size:
        first = prefix_tokens % source_page_size // size
        source_pages = _parts(source_pages, source_page_size // size, first, len(destination_pages), "source")
    elif source_page_size < destination_page_size:
        parts = destination_page_size // size
        destination_pages = _parts(destination_pages, parts, 0, len(source_pages), "destination")
    elif len(source_pages) != len(destination_pages):
        raise InvalidKvArgument(
            f"{len(source_pages)} source pages and {len(destination_pages)} destination pages; they go one for one",
            source_pages=len(source_pages),
            destination_pages=len(destination_pages),
        )
    return source_pages, destination_pages


def page_copies(
    stream: StreamPlan, source_numbers: Sequence[int], destination_numbers: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Every extent of a stream over its layers and the given pages: int64 `[layers * pages * extents, 3]`.

    Columns: byte offset in the source region, byte offset in the destination region, length. Layers outermost, then
    pages in the order given. Numbers are those of `number_pages`; whether they are within the regions is not checked.
    """
    extents = np.array(stream.extents, dtype=np.int64)
    copies = np.empty((stream.layers, len(source_numbers), len(extents), 3), dtype=np.int64)
    sides = ((stream.source, source_numbers), (stream.destination, destination_numbers))
    for column, (grid, numbers) in enumerate(sides):
        starts = grid.starts(stream.layers, np.asarray(numbers, dtype=np.int64))
        copies[..., column] = starts[:, :, None] + extents[:, column]
    copies[..., 2] = extents[:, 2]
    return copies.reshape(-1, 3)


def _grid(layout: PageLayout, page_size: int) -> PageGrid:
    parts = layout.page_size // page_size
    part_stride = page_size * layout.token_stride if parts > 1 else 0
    return PageGrid(layout.layer_bytes, layout.page_bytes, parts, part_stride)


def _parts(pages: Sequence[int], parts: int, first: int, count: int, side: str) -> list[int]:
    """Numbers of `count` parts, from part `first` of the first page on. Raises `InvalidKvArgument`."""
    needed = -(-(first + count) // parts) if count else 0
    if len(pages) != needed:
        raise InvalidKvArgument(
            f"{len(pages)} {side} pages for {count} pages a {parts}th of their size, from part {first} on; {needed} "
            f"hold them",
            pages=len(pages),
            needed=needed,
        )
    # Only those that are wanted: how many parts a page of the other side has is that side's word.
    wanted = np.arange(first, first + count, dtype=np.int64)
    chosen: list[int] = (np.asarray(pages, dtype=np.int64)[wanted // parts] * parts + wanted % parts).tolist()
    return chosen
