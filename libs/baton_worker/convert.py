"""Between the messages on the wire and the values of `baton_kv`."""

from __future__ import annotations

from typing import cast

from baton.v1 import common_pb2

from baton_kv.layout import Order, PageLayout
from baton_worker.errors import InvalidRequest

_ORDERS = {
    "HND": common_pb2.KV_ORDER_HND,
    "NHD": common_pb2.KV_ORDER_NHD,
    "MLA": common_pb2.KV_ORDER_MLA,
}
_NAMES = {value: name for name, value in _ORDERS.items()}


def layout_to_proto(layout: PageLayout, dtype: str, total_kv_heads: int) -> common_pb2.KvLayout:
    """`layout` is one rank's; the message carries the whole model's number of KV heads."""
    return common_pb2.KvLayout(
        order=_ORDERS[layout.order],
        layers=layout.layers,
        pages=layout.pages,
        page_size=layout.page_size,
        kv_heads=total_kv_heads,
        head_dim=layout.head_dim,
        element_size=layout.element_size,
        dtype=dtype,
    )


def layout_from_proto(message: common_pb2.KvLayout, kv_heads: int) -> PageLayout:
    """The layout of a rank that holds `kv_heads` of the message's heads; raises InvalidRequest on an unknown order."""
    order = _NAMES.get(message.order)
    if order is None:
        raise InvalidRequest(f"unknown KV order {message.order}; known: {sorted(_ORDERS)}", order=message.order)
    return PageLayout(
        order=cast(Order, order),
        layers=message.layers,
        pages=message.pages,
        page_size=message.page_size,
        kv_heads=kv_heads,
        head_dim=message.head_dim,
        element_size=message.element_size,
    )
