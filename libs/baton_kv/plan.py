"""What a transfer moves: pages, extents, and from which rank to which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import InvalidKvArgument
from .layout import Order, PageLayout
from .shards import ShardMap


class LayoutMismatch(InvalidKvArgument):
    """Two caches that can't be written into each other page by page."""

    status = "FAILED_PRECONDITION"
    reason = "KV_LAYOUT_MISMATCH"


# (source offset, destination offset, length): bytes within a page of each side. Where one side's pages are larger, its
# offsets are those of the page's first part; a part further on lies a number of tokens further.
Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What one source rank writes into one destination rank, the same for every page of every layer.

    `extents` are ordered by source offset. `source` and `destination` are the layouts of these two ranks: their strides
    and sizes are the ones that the extents refer to. Page sizes may differ; then everything counts in the smaller.
    """

    source_rank: int
    destination_rank: int
    source: PageLayout
    destination: PageLayout
    extents: tuple[Extent, ...]

    @property
    def page_size(self) -> int:
        """Tokens of the smaller of the two pages: what `extents` move."""
        return min(self.source.page_size, self.destination.page_size)


def common_page_size(source: int, destination: int) -> int:
    """Tokens of the pages in which a transfer between two page sizes counts: the smaller. Raises `LayoutMismatch`."""
    smaller, larger = sorted((source, destination))
    if smaller < 1 or larger % smaller:
        raise LayoutMismatch(
            f"page_size is {source} at the source and {destination} at the destination; one must divide the other",
            field="page_size",
            source=source,
            destination=destination,
        )
    return smaller


def pages_to_transfer(prompt_tokens: int, prefix_tokens: int, page_size: int) -> int:
    """Pages of a layer to move: `ceil((T - 1) / p) - h / p`, never less than 0.

    The last prompt token is left to the destination. `prefix_tokens` (h) are whole pages that it already holds. Between
    two page sizes `page_size` is `common_page_size`; for the pages that one side has to hold, its own. Raises
    `InvalidKvArgument`.
    """
    _check_prompt(prompt_tokens, prefix_tokens, page_size)
    return max(0, -(-(prompt_tokens - 1) // page_size) - prefix_tokens // page_size)


def chunk_pages(prompt_tokens: int, prefix_tokens: int, page_size: int, start: int, end: int) -> range:
    """Positions in the transfer's list of pages that are complete once prompt positions [start, end) are computed.

    Between two page sizes `page_size` is `common_page_size`: a part of a larger page is sent as soon as it is complete.

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
    source_page_size: int | None = None,
) -> int:
    """Extents that a destination inbox waits for, from the shard maps alone; 0 where no page has to move.

    `E = R * L * P * (extents of a page over the pairs of overlapping slices) + tail_buffers * (ranks of one
    data-parallel rank)`. `page_size` is the destination's; `source_page_size` the source's, where it is another: then P
    and the extents are those of the smaller. Computed from the boundaries of the slices, independently of `plan_pairs`.
    Raises `InvalidKvArgument`, `LayoutMismatch`.
    """
    _check_heads(source, destination, order)
    _check_prompt(prompt_tokens, prefix_tokens, page_size)
    size = common_page_size(source_page_size or page_size, page_size)
    pages = pages_to_transfer(prompt_tokens, prefix_tokens, size)
    if not pages:
        return 0
    ours = {(heads.start, heads.stop) for heads in destination.slices()}
    theirs = {(heads.start, heads.stop) for heads in source.slices()}
    pairs = len({start for start, _ in ours | theirs})
    whole = len(ours & theirs)
    part = 2 * size if order == "NHD" else 2
    if page_size == (source_page_size or page_size) or order == "MLA":
        per_page = whole + part * (pairs - whole)
    elif order == "NHD":
        per_page = 2 * whole + part * (pairs - whole)
    else:
        # In a page of another size a head's tokens are not followed by the next head's.
        per_page = 2 * destination.heads
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
    common_page_size(source_layout.page_size, destination_layout.page_size)
    for name in ("order", "layers", "head_dim", "element_size"):
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


def _extents(ours: range, theirs: range, source: PageLayout, destination: PageLayout) -> tuple[Extent, ...]:
    """Extents of one page for the heads that both ranks have."""
    start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    if start >= stop:
        return ()
    page_size = min(source.page_size, destination.page_size)
    one_size = source.page_size == destination.page_size
    if source.order == "MLA" or (one_size and ours == theirs):
        return ((0, 0, page_size * source.token_bytes),)
    token = source.head_dim * source.element_size
    if source.order == "HND":
        # A head's tokens are contiguous: so are those of several heads, if the page ends where they do on both sides.
        heads, tokens, length = (1, 1, stop - start) if one_size else (stop - start, 1, 1)
        length *= page_size * token
    else:
        # A token's heads are contiguous, and so are several tokens, if the ranks have the same heads.
        heads, tokens, length = (1, 1, page_size) if ours == theirs else (1, page_size, 1)
        length *= (stop - start) * token
    offsets = (
        _run_offsets(source, start - ours.start, heads, tokens),
        _run_offsets(destination, start - theirs.start, heads, tokens),
    )
    return tuple((a, b, length) for a, b in zip(*offsets, strict=True))


def _run_offsets(layout: PageLayout, first_head: int, heads: int, tokens: int) -> list[int]:
    """Bytes at which a page's runs begin: of K, then V; of `heads` heads from `first_head` on; of `tokens` tokens."""
    token = layout.head_dim * layout.element_size
    head_stride = token * (layout.page_size if layout.order == "HND" else 1)
    plane = np.arange(2, dtype=np.int64)[:, None, None] * (layout.page_bytes // 2)
    head = (first_head + np.arange(heads, dtype=np.int64))[:, None] * head_stride
    offsets: list[int] = (plane + head + np.arange(tokens, dtype=np.int64) * layout.token_stride).reshape(-1).tolist()
    return offsets


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
