"""The paged KV cache as tensors over memory that the caller owns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from .errors import InvalidBatch

PageOrder = Literal["HND", "NHD"]


class KvCache:
    """KV entries of one rank: `[layers, pages, 2, kv_heads, page_size, head_dim]` (HND, K before V) or
    `[layers, pages, 2, page_size, kv_heads, head_dim]` (NHD), contiguous.

    `buffer` is any writable buffer of at least that many bytes, usually shared memory; the cache keeps it alive, and
    the caller must not unmap it while the cache is in use. What the buffer holds is taken as it is. Entries are
    addressed by rows of a two-dimensional view of a layer, so that a layout is nothing but an index computation:
    `token_rows` for writing single tokens, `page_rows` for whole pages.

    Raises `InvalidBatch` where the buffer is too small or a size is not positive.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        order: PageOrder,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        inner = (kv_heads, page_size) if order == "HND" else (page_size, kv_heads)
        shape = (layers, pages, 2, *inner, head_dim)
        if order not in ("HND", "NHD") or min(shape) < 1:
            raise InvalidBatch(f"a KV cache of order {order!r} and shape {list(shape)} is not possible", order=order)
        needed, available = math.prod(shape) * dtype.itemsize, memoryview(buffer).nbytes
        if available < needed:
            raise InvalidBatch(
                f"the buffer has {available} bytes; a KV cache of shape {list(shape)} in {dtype} needs {needed}",
                available=available,
                needed=needed,
            )
        self.order = order
        self.layers, self.pages, self.page_size = layers, pages, page_size
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.tensor = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)
        # Elements that lie side by side for one token and for one page, in K or in V.
        self._token_width = head_dim if order == "HND" else kv_heads * head_dim
        self._page_width = page_size * self._token_width
        self._by_token = list(self.tensor.view(layers, -1, self._token_width).unbind())
        self._by_page = list(self.tensor.view(layers, -1, self._page_width).unbind())

    def token_rows(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where tokens lie, for `write`: int64 `[N]` pages and offsets within them to int64 `[N * rows a token]`."""
        planes = torch.arange(2)
        if self.order == "NHD":
            rows = (pages[:, None] * 2 + planes) * self.page_size + offsets[:, None]
        else:
            heads = torch.arange(self.kv_heads)
            rows = ((pages[:, None, None] * 2 + planes[:, None]) * self.kv_heads + heads) * self.page_size
            rows = rows + offsets[:, None, None]
        return rows.reshape(-1)

    def page_rows(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Where the pages of B equally long tables lie, for `gather` and `clear`."""
        pages = torch.tensor(tables, dtype=torch.int64)
        planes = torch.arange(2)
        if self.order == "NHD":
            return (pages[:, None, :] * 2 + planes[:, None]).reshape(-1)
        heads = torch.arange(self.kv_heads)
        rows = (pages[:, None, None, :] * 2 + planes[:, None, None]) * self.kv_heads + heads[:, None]
        return rows.reshape(-1)

    def clear(self, layer: int, rows: torch.Tensor) -> None:
        """Sets the pages that `page_rows` named to zero."""
        self._by_page[layer].index_fill_(0, rows, 0)

    def write(self, layer: int, rows: torch.Tensor, entries: torch.Tensor) -> None:
        """Stores `entries [N, 2, kv_heads, head_dim]` (K, V) at the rows that `token_rows` named."""
        self._by_token[layer].index_copy_(0, rows, entries.reshape(-1, self._token_width))

    def gather(self, layer: int, rows: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies out the pages that `page_rows` named: K and V, each `[sequences, kv_heads, pages * page_size,
        head_dim]`. NHD comes as a strided view."""
        found = self._by_page[layer].index_select(0, rows)
        if self.order == "NHD":
            entries = found.view(sequences, 2, -1, self.kv_heads, self.head_dim).transpose(2, 3)
        else:
            entries = found.view(sequences, 2, self.kv_heads, -1, self.head_dim)
        return entries[:, 0], entries[:, 1]
