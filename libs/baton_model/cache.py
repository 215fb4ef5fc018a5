"""The paged caches as tensors over memory that the caller owns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .errors import InvalidBatch

PageOrder = Literal["HND", "NHD", "MLA"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model asks of its cache, whatever the pages' number, size and order: per layer and token a K and a V of
    `kv_heads` (this rank's) times `head_dim` elements or, where the cache is `latent`, one vector of `head_dim`."""

    layers: int
    kv_heads: int
    head_dim: int
    latent: bool = False


class PagedCache(ABC):
    """One rank's cache: `[layers, pages, *page_shape]`, contiguous.

    `buffer` is any writable buffer of at least that many bytes, usually shared memory, or a tensor of uint8 where the
    cache lies on a device; the cache keeps it alive, and the caller must not unmap it while the cache is in use. What
    the buffer holds is taken as it is. Entries are addressed by rows of a two-dimensional view of a layer, so that a
    layout is nothing but an index computation: `token_rows` for writing single tokens, `page_rows` for whole pages.

    Raises `InvalidBatch` where the buffer is too small or a size is not positive.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        shape: CacheShape,
        order: PageOrder,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        page_shape: tuple[int, ...],
        token_width: int,
    ) -> None:
        """`token_width`: elements that lie side by side for one token, in K, in V or in the latent."""
        tensor_shape = (shape.layers, pages, *page_shape)
        if min(tensor_shape) < 1:
            raise InvalidBatch(
                f"a KV cache of order {order!r} and shape {list(tensor_shape)} is not possible", order=order
            )
        needed, available = math.prod(tensor_shape) * dtype.itemsize, _elements(buffer).nbytes
        if available < needed:
            raise InvalidBatch(
                f"the buffer has {available} bytes; a KV cache of shape {list(tensor_shape)} in {dtype} needs {needed}",
                available=available,
                needed=needed,
            )
        self.shape, self.order = shape, order
        self.layers, self.kv_heads, self.head_dim = shape.layers, shape.kv_heads, shape.head_dim
        self.pages, self.page_size, self.dtype = pages, page_size, dtype
        self.tensor = _elements(buffer)[:needed].view(dtype).view(tensor_shape)
        self._token_width = token_width
        self._by_token = list(self.tensor.view(shape.layers, -1, token_width).unbind())
        self._by_page = list(self.tensor.view(shape.layers, -1, page_size * token_width).unbind())

    @abstractmethod
    def token_rows(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where tokens lie, for `write`: int64 `[N]` pages and offsets within them to int64 `[N * rows a token]`."""

    @abstractmethod
    def page_rows(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Where the pages of B equally long tables lie, for `gather` and `clear`."""

    def clear(self, layer: int, rows: torch.Tensor) -> None:
        """Sets the pages that `page_rows` named to zero."""
        self._by_page[layer].index_fill_(0, rows, 0)

    def write(self, layer: int, rows: torch.Tensor, entries: torch.Tensor) -> None:
        """Stores the entries of N tokens at the rows that `token_rows` named."""
        self._by_token[layer].index_copy_(0, rows, entries.reshape(-1, self._token_width))


class KvCache(PagedCache):
    """Keys and values: `[layers, pages, 2, kv_heads, page_size, head_dim]` (HND, K before V) or
    `[layers, pages, 2, page_size, kv_heads, head_dim]` (NHD). `write` takes entries `[N, 2, kv_heads, head_dim]`.

    Raises as `PagedCache` does, and `InvalidBatch` for another order.
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
        if order not in ("HND", "NHD"):
            raise InvalidBatch(f"a cache of keys and values of order {order!r} is not possible", order=order)
        inner = (kv_heads, page_size) if order == "HND" else (page_size, kv_heads)
        super().__init__(
            buffer,
            shape=CacheShape(layers, kv_heads, head_dim),
            order=order,
            pages=pages,
            page_size=page_size,
            dtype=dtype,
            page_shape=(2, *inner, head_dim),
            token_width=head_dim if order == "HND" else kv_heads * head_dim,
        )

    def token_rows(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `PagedCache.token_rows`."""
        planes = torch.arange(2)
        if self.order == "NHD":
            rows = (pages[:, None] * 2 + planes) * self.page_size + offsets[:, None]
        else:
            heads = torch.arange(self.kv_heads)
            rows = ((pages[:, None, None] * 2 + planes[:, None]) * self.kv_heads + heads) * self.page_size
            rows = rows + offsets[:, None, None]
        return rows.reshape(-1)

    def page_rows(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `PagedCache.page_rows`."""
        pages = torch.tensor(tables, dtype=torch.int64)
        planes = torch.arange(2)
        if self.order == "NHD":
            return (pages[:, None, :] * 2 + planes[:, None]).reshape(-1)
        heads = torch.arange(self.kv_heads)
        rows = (pages[:, None, None, :] * 2 + planes[:, None, None]) * self.kv_heads + heads[:, None]
        return rows.reshape(-1)

    def gather(self, layer: int, rows: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies out the pages that `page_rows` named: K and V, each `[sequences, kv_heads, pages * page_size,
        head_dim]`. NHD comes as a strided view."""
        found = self._by_page[layer].index_select(0, rows)
        if self.order == "NHD":
            entries = found.view(sequences, 2, -1, self.kv_heads, self.head_dim).transpose(2, 3)
        else:
            entries = found.view(sequences, 2, self.kv_heads, -1, self.head_dim)
        return entries[:, 0], entries[:, 1]


class LatentCache(PagedCache):
    """Latent entries: `[layers, pages, page_size, width]`, one vector a token and layer (order MLA), of which all heads
    make their keys and values. `write` takes entries `[N, width]`. Raises as `PagedCache` does.
    """

    def __init__(self, buffer: Any, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(
            buffer,
            shape=CacheShape(layers, 1, width, latent=True),
            order="MLA",
            pages=pages,
            page_size=page_size,
            dtype=dtype,
            page_shape=(page_size, width),
            token_width=width,
        )

    def token_rows(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `PagedCache.token_rows`."""
        return pages * self.page_size + offsets

    def page_rows(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `PagedCache.page_rows`."""
        return torch.tensor(tables, dtype=torch.int64).reshape(-1)

    def gather(self, layer: int, rows: torch.Tensor, sequences: int) -> torch.Tensor:
        """Copies out the pages that `page_rows` named: `[sequences, pages * page_size, width]`."""
        return self._by_page[layer].index_select(0, rows).view(sequences, -1, self.head_dim)


def open_cache(
    buffer: Any, shape: CacheShape, *, order: PageOrder, pages: int, page_size: int, dtype: torch.dtype
) -> PagedCache:
    """The cache that a model of this shape needs. `order` is of caches with keys and values: a latent one has but one.

    Raises `InvalidBatch`.
    """
    if shape.latent:
        return LatentCache(
            buffer, layers=shape.layers, pages=pages, page_size=page_size, width=shape.head_dim, dtype=dtype
        )
    return KvCache(
        buffer,
        order=order,
        layers=shape.layers,
        pages=pages,
        page_size=page_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
    )


def _elements(buffer: Any) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
