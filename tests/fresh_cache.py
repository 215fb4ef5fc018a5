"""A KV cache over memory of its own."""

from __future__ import annotations

import torch

from baton_model.cache import KvCache


def fresh_cache(
    order: str = "HND",
    pages: int = 8,
    page_size: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> KvCache:
    """Zeros in `layers` layers of `pages` pages of `page_size` tokens."""
    return KvCache(
        bytearray(layers * pages * 2 * kv_heads * page_size * head_dim * dtype.itemsize),
        order=order,
        layers=layers,
        pages=pages,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
