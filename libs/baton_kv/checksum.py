"""Which bytes a transfer's checksum covers, as either side sees them.

The checksum is a sum over *units*, the smallest pieces that no sharding and no page size divides: one token of one
head, K or V (of a latent cache: one token). A unit counts with its bytes and with its place in the destination's
memory, so that both sides get the same sum however the writes were cut and put together, and whatever way the ranks
divide the heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import InvalidKvArgument
from .layout import PageLayout
from .regions import RegionMap
from .streams import StreamPlan, page_copies

Runs = npt.NDArray[np.uint64]
"""uint64 `[n, 3]`: byte in this side's region, byte in the destination's region, length; lengths in whole units."""


def unit_bytes(layout: PageLayout) -> int:
    """Bytes of a unit: the same on both sides of a transfer."""
    return layout.head_dim * layout.element_size


def transfer_tokens(prompt_tokens: int, prefix_tokens: int, source_page_size: int, page_size: int) -> int:
    """Positions that a transfer writes at the destination, from `prefix_tokens` on (whole pages of the destination):
    the last of the smaller pages of the two sides is written whole. 0 if there is nothing to transfer."""
    size = min(source_page_size, page_size)
    return max(0, -(-(prompt_tokens - 1) // size) * size - prefix_tokens)


def source_runs(stream: StreamPlan, source_numbers: Sequence[int], destination_numbers: Sequence[int]) -> Runs:
    """What a stream reads, and where it goes. Numbers: those of `baton_kv.streams.number_pages`."""
    return page_copies(stream, source_numbers, destination_numbers).astype(np.uint64)


def destination_runs(layout: PageLayout, regions: RegionMap, pages: Sequence[int], tokens: int) -> list[Runs]:
    """What is written into one rank's memory, by region of its list: the first `tokens` positions of these pages.

    `layout` is this rank's. Raises `InvalidKvArgument` where `tokens` do not end in the last of the pages, or the cache
    has not these pages or not so many.
    """
    size = layout.page_size
    if len(pages) > layout.pages:
        raise InvalidKvArgument(f"{len(pages)} pages; the cache has {layout.pages}", pages=len(pages))
    if not (len(pages) - 1) * size < tokens <= len(pages) * size and (tokens or pages):
        raise InvalidKvArgument(
            f"{tokens} tokens do not end in the last of {len(pages)} pages of {size} tokens", tokens=tokens
        )
    if pages and not 0 <= min(pages) <= max(pages) < layout.pages:
        raise InvalidKvArgument(f"the pages reach from {min(pages)} to {max(pages)}; the cache has {layout.pages}")
    found: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(max(run.region for run in regions.runs) + 1)]
    full, rest = divmod(tokens, size)
    for run in regions.runs:
        layers = run.offset + np.arange(run.layers, dtype=np.int64)[:, None] * layout.layer_bytes
        places = layers + np.asarray(pages, dtype=np.int64) * layout.page_bytes
        found[run.region].append(_runs(places[:, :full].reshape(-1), layout.page_bytes))
        if rest:
            # The beginning of the last page: in HND of each head by itself.
            parts, length = _begun(layout, rest)
            found[run.region].append(_runs((places[:, full:, None] + parts).reshape(-1), length))
    return [np.concatenate(runs).astype(np.uint64) if runs else np.empty((0, 3), np.uint64) for runs in found]


def _begun(layout: PageLayout, tokens: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where in a page the runs of its first `tokens` tokens begin, and the length of each."""
    planes, heads = (1, 1) if layout.order == "MLA" else (2, layout.kv_heads)
    if layout.order == "HND":
        planes, heads = planes * heads, 1
    token = heads * unit_bytes(layout)
    return np.arange(planes, dtype=np.int64) * layout.page_size * token, tokens * token


def _runs(places: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    return np.stack([places, places, np.full_like(places, length)], axis=1)
