"""How one rank's KV cache lies in its region."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from .errors import InvalidKvArgument

Order = Literal["HND", "NHD", "MLA"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One rank's cache: region `[layers, pages, page]`, contiguous, where a page holds one layer of `page_size` tokens.

    HND: a page is `[2, kv_heads, page_size, head_dim]` (K, then V). NHD: `[2, page_size, kv_heads, head_dim]`.
    MLA: `[page_size, head_dim]` with `head_dim` = latent + rope, and `kv_heads` = 1.

    `kv_heads` are this rank's heads, not the model's; `element_size` is in bytes. Raises `InvalidKvArgument`.
    """

    order: Order
    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    element_size: int

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InvalidKvArgument(f"order is {self.order!r}; it must be one of {', '.join(ORDERS)}", order=self.order)
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise InvalidKvArgument(
                    f"{field.name} is {value!r}; it must be a positive integer", **{field.name: value}
                )
        if self.order == "MLA" and self.kv_heads != 1:
            raise InvalidKvArgument(
                f"kv_heads is {self.kv_heads}; a latent (MLA) page has exactly 1", kv_heads=self.kv_heads
            )

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Elements of one page, outermost dimension first."""
        if self.order == "HND":
            return (2, self.kv_heads, self.page_size, self.head_dim)
        if self.order == "NHD":
            return (2, self.page_size, self.kv_heads, self.head_dim)
        return (self.page_size, self.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of the region: `[layers, pages, *page_shape]`."""
        return (self.layers, self.pages, *self.page_shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: K and V of this rank's heads, or the latent."""
        planes = 1 if self.order == "MLA" else 2
        return planes * self.kv_heads * self.head_dim * self.element_size

    @property
    def token_stride(self) -> int:
        """Bytes from one token of a page to the next, of the same head."""
        return self.head_dim * self.element_size * (self.kv_heads if self.order == "NHD" else 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: the stride of a page."""
        return self.page_size * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of all pages of one layer: the stride of a layer."""
        return self.pages * self.page_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.layers * self.layer_bytes

    def page_offset(self, layer: int, page: int) -> int:
        """Byte offset of a page in the region."""
        if not 0 <= layer < self.layers:
            raise InvalidKvArgument(f"layer is {layer}; it must be in [0, {self.layers})", layer=layer)
        if not 0 <= page < self.pages:
            raise InvalidKvArgument(f"page is {page}; it must be in [0, {self.pages})", page=page)
        return layer * self.layer_bytes + page * self.page_bytes
