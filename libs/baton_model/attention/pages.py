"""Which pages a forward pass reads and which it begins: what every backend asks of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import ForwardBatch
from ..errors import InvalidBatch


def page_tables(batch: ForwardBatch, page_size: int, pages: int) -> list[list[int]]:
    """The pages that hold each sequence's context, in the order of its tokens.

    Raises `InvalidBatch` where a sequence has too few, or names one outside a cache of `pages` pages.
    """
    tables = [batch.table(i, -(-length // page_size)) for i, length in enumerate(batch.context_lens)]
    for sequence, table in enumerate(tables):
        for page in (min(table), max(table)):
            if not 0 <= page < pages:
                raise InvalidBatch(
                    f"sequence {sequence} names page {page}; the cache has pages 0 to {pages - 1}",
                    sequence=sequence,
                    page=page,
                )
    return tables


def begun_pages(batch: ForwardBatch, tables: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """Pages whose first token this batch writes, and whose last it doesn't.

    They are cleared first. What an earlier owner left there would otherwise travel with the page to other workers, and
    a masked score or value that is not a number still spoils a sum.
    """
    return [
        table[-1]
        for query, context, table in zip(batch.query_lens, batch.context_lens, tables, strict=True)
        if 0 < context % page_size <= query
    ]
