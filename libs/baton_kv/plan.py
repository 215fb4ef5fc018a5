"""What a transfer moves: pages, extents, and from which rank to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import InvalidKvArgument
from .layout import Order, PageLayout
from .shards import ShardMap


class LayoutMismatch(InvalidKvArgument):
    """Two caches that can't be written into each other page by page."""

    status = "FAILED_PRECONDITION"
    reason = "KV_LAYOUT_MISMATCH"


# (source offset, destination offset, length): bytes within a page of each side.
Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What one source rank writes into one destination rank, the same for every page of every layer.

    `extents` are ordered by source offset. `source` and `destination` are the layouts of these two ranks: their strides
    and sizes are the ones that the extents refer to.
    """

    source_rank: int
    destination_rank: int
    source: PageLayout
    destination: PageLayout
    extents: tuple[Extent, ...]

    @property
    def bytes_per_page(self) -> int:
        return sum(length for _, _, length in self.extents)


def pages_to_transfer(prompt_tokens: int, prefix_tokens: int, page_size: int) -> int:
    """Pages of a layer to move: `ceil((T - 1) / p) - h / p`, never less than 0.

    The last prompt token is left to the destination. `prefix_tokens` (h) are whole pages that it already holds. Raises
    `InvalidKvArgument`.
    """
    _check_prompt(prompt_tokens, prefix_tokens, page_size)
    return max(0, -(-(prompt_tokens - 1) // page_size) - prefix_tokens // page_size)


def chunk_pages(prompt_tokens: int, prefix_tokens: int, page_size: int, start: int, end: int) -> range:
    """Positions in the transfer's list of pages that are complete once prompt positions [start, end) are computed.

    `end` is at most `T - 1`, as the last token is not prefilled. A chunk that ends inside a page leaves it to the next;
    the one that ends at `T - 1` takes the last page, full or not. Over chunks that follow each other from `start` <=
    `prefix_tokens` to `T - 1`, each page comes exactly once. Positions that the source had cached belong to the first
    chunk: its `start` is where the transfer starts. Raises `InvalidKvArgument`.
    """
    _check_prompt(prompt_tokens, prefix_tokens, page_size)
    prefilled = prompt_tokens - 1
    if not 0 <= start <= end <= prefilled:
        raise InvalidKvArgument(
            f"chunk is [{start}, {end}); it must lie in the prefilled positions [0, {prefilled})", start=start, end=end
        )

    def complete(position: int) -> int:
        pages = -(-position // page_size) if position == prefilled else position // page_size
        return max(0, pages - prefix_tokens // page_size)

    return range(complete(start), complete(end))


def expected_extents(
    source: ShardMap,
    destination: ShardMap,
    order: Order,
    *,
    prompt_tokens: int,
    prefix_tokens: int,
    page_size: int,
    layers: int,
    tail_buffers: int = 0,
) -> int:
    """Extents that a destination inbox waits for, from the shard maps alone; 0 where no page has to move.

    `E = R * L * P * (extents of a page over the pairs of overlapping slices) + tail_buffers * (ranks of one
    data-parallel rank)`. Computed from the boundaries of the slices, independently of `plan_pairs`. Raises
    `InvalidKvArgument`, `LayoutMismatch`.
    """
    _check_heads(source, destination, order)
    pages = pages_to_transfer(prompt_tokens, prefix_tokens, page_size)
    if not pages:
        return 0
    ours = {(heads.start, heads.stop) for heads in destination.slices()}
    theirs = {(heads.start, heads.stop) for heads in source.slices()}
    pairs = len({start for start, _ in ours | theirs})
    whole = len(ours & theirs)
    part = 2 * page_size if order == "NHD" else 2
    per_page = whole + part * (pairs - whole)
    return destination.replicas * layers * pages * per_page + tail_buffers * destination.tp


def plan_pairs(
    source: ShardMap,
    destination: ShardMap,
    source_layout: PageLayout,
    destination_layout: PageLayout,
    dp_rank: int,
    seed: int,
    source_dp_rank: int = 0,
) -> list[PairPlan]:
    """Who writes what to whom, for a request on data-parallel rank `dp_rank` of the destination.

    `kv_heads` of the two layouts are not used: each rank's own number comes from its shard map. Every destination
    replica set is fed by one source replica set; `seed` (the transfer's id) draws the first, and further ones follow in
    turn, so that as many source ranks as possible take part. Raises `InvalidKvArgument`, `LayoutMismatch`.
    """
    _check_heads(source, destination, source_layout.order)
    for name in ("order", "layers", "page_size", "head_dim", "element_size"):
        left, right = getattr(source_layout, name), getattr(destination_layout, name)
        if left != right:
            raise LayoutMismatch(
                f"{name} is {left} at the source and {right} at the destination; they must be equal",
                field=name,
                source=left,
                destination=right,
            )
    source_sets = source.replica_sets(source_dp_rank)
    first = _draw(seed, len(source_sets))
    pairs: list[PairPlan] = []
    for index, destination_set in enumerate(destination.replica_sets(dp_rank)):
        source_set = source_sets[(first + index) % len(source_sets)]
        for destination_rank in destination_set:
            for source_rank in source_set:
                ours = source.layout_of(source_rank, source_layout)
                theirs = destination.layout_of(destination_rank, destination_layout)
                extents = _extents(source.heads_of(source_rank), destination.heads_of(destination_rank), ours, theirs)
                if extents:
                    pairs.append(PairPlan(source_rank, destination_rank, ours, theirs, extents))
    return pairs


def page_copies(pair: PairPlan, source_pages: Sequence[int], destination_pages: Sequence[int]) -> npt.NDArray[np.int64]:
    """Every extent of a pair over all layers and the given pages: int64 `[layers * pages * extents, 3]`.

    Columns: byte offset in the source rank's region, byte offset in the destination rank's region, length. Layers
    outermost, then pages in the order given. Raises `InvalidKvArgument`.
    """
    ours, theirs = _page_numbers(source_pages, pair.source), _page_numbers(destination_pages, pair.destination)
    if len(ours) != len(theirs):
        raise InvalidKvArgument(
            f"{len(ours)} source pages and {len(theirs)} destination pages; they go one for one",
            source_pages=len(ours),
            destination_pages=len(theirs),
        )
    extents = np.array(pair.extents, dtype=np.int64)
    layers = np.arange(pair.source.layers, dtype=np.int64)[:, None, None]
    copies = np.empty((pair.source.layers, len(ours), len(extents), 3), dtype=np.int64)
    for column, (pages, layout) in enumerate(((ours, pair.source), (theirs, pair.destination))):
        starts = layers * layout.layer_bytes + pages[None, :, None] * layout.page_bytes
        copies[..., column] = starts + extents[None, None, :, column]
    copies[..., 2] = extents[:, 2]
    return copies.reshape(-1, 3)


def _extents(ours: range, theirs: range, source: PageLayout, destination: PageLayout) -> tuple[Extent, ...]:
    """Extents of one page for the heads that both ranks have."""
    start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    if start >= stop:
        return ()
    if ours == theirs:
        return ((0, 0, source.page_bytes),)
    token = source.head_dim * source.element_size
    # HND: a head's tokens are contiguous, so K and V are a run each. NHD: every token of K and V is a run.
    rows, head = (2, source.page_size * token) if source.order == "HND" else (2 * source.page_size, token)
    row = np.arange(rows, dtype=np.int64)
    source_offsets = (row * len(ours) + start - ours.start) * head
    destination_offsets = (row * len(theirs) + start - theirs.start) * head
    length = (stop - start) * head
    return tuple((a, b, length) for a, b in zip(source_offsets.tolist(), destination_offsets.tolist(), strict=True))


def _draw(seed: int, choices: int) -> int:
    """Fibonacci hashing: ids that follow each other fall evenly on the choices, and so do ids at any stride."""
    return ((seed * 0x9E3779B97F4A7C15) % (1 << 64)) * choices >> 64


def _check_heads(source: ShardMap, destination: ShardMap, order: Order) -> None:
    for name, left, right in (
        ("mla", source.mla, destination.mla),
        ("kv_heads_total", source.heads, destination.heads),
    ):
        if left != right:
            raise LayoutMismatch(
                f"{name} is {left} at the source and {right} at the destination; they must be equal",
                field=name,
                source=left,
                destination=right,
            )
    if source.mla != (order == "MLA"):
        raise LayoutMismatch(
            f"mla is {source.mla} in the shard maps and the page order is {order}; MLA pages go with mla maps only",
            field="mla",
            order=order,
        )


def _check_prompt(prompt_tokens: int, prefix_tokens: int, page_size: int) -> None:
    if page_size < 1:
        raise InvalidKvArgument(f"page_size is {page_size}; it must be at least 1", page_size=page_size)
    if prompt_tokens < 1:
        raise InvalidKvArgument(
            f"prompt_tokens is {prompt_tokens}; a prompt has at least 1", prompt_tokens=prompt_tokens
        )
    if not 0 <= prefix_tokens <= prompt_tokens or prefix_tokens % page_size:
        raise InvalidKvArgument(
            f"prefix_tokens is {prefix_tokens}; it must be a multiple of {page_size} in [0, {prompt_tokens}]",
            prefix_tokens=prefix_tokens,
        )


def _page_numbers(pages: Sequence[int], layout: PageLayout) -> npt.NDArray[np.int64]:
    numbers = np.asarray(pages, dtype=np.int64)
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < layout.pages):
        raise InvalidKvArgument(
            f"pages go from {numbers.min()} to {numbers.max()}; they must be in [0, {layout.pages})", pages=layout.pages
        )
    return numbers
