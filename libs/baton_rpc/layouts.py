"""KV layouts on the wire."""

from baton.v1 import common_pb2

from baton_kv.layout import Order, PageLayout
from baton_kv.plan import LayoutMismatch, common_page_size

ORDERS: dict[Order, common_pb2.KvOrder.ValueType] = {
    "HND": common_pb2.KV_ORDER_HND,
    "NHD": common_pb2.KV_ORDER_NHD,
    "MLA": common_pb2.KV_ORDER_MLA,
}
ORDER_NAMES: dict[common_pb2.KvOrder.ValueType, Order] = {value: name for name, value in ORDERS.items()}


def layout_message(layout: PageLayout, dtype: str, kv_heads: int) -> common_pb2.KvLayout:
    """``layout`` is one rank's; the message carries the whole model's number of KV heads."""
    return common_pb2.KvLayout(
        order=ORDERS[layout.order],
        layers=layout.layers,
        pages=layout.pages,
        page_size=layout.page_size,
        kv_heads=kv_heads,
        head_dim=layout.head_dim,
        element_size=layout.element_size,
        dtype=dtype,
    )


def transferable(source: common_pb2.KvLayout, destination: common_pb2.KvLayout) -> bool:
    """Whether pages of one cache can be written into the other: all is equal but the number of pages, which is each
    side's own affair, and the page size, of which one divides the other."""
    try:
        common_page_size(source.page_size, destination.page_size)
    except LayoutMismatch:
        return False
    same = common_pb2.KvLayout()
    same.CopyFrom(source)
    same.pages, same.page_size = destination.pages, destination.page_size
    return same == destination
