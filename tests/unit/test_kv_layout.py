"""Layouts and immediates: bytes, offsets, bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv import immediate
from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import Order, PageLayout


def layout(order: Order = "HND", **changes: object) -> PageLayout:
    values = {"layers": 3, "pages": 5, "page_size": 4, "kv_heads": 2, "head_dim": 8, "element_size": 2}
    if order == "MLA":
        values["kv_heads"] = 1
    return PageLayout(order=order, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["HND", "NHD", "MLA"])
def test_bytes_are_those_of_the_array(order: Order) -> None:
    subject = layout(order)
    region = np.zeros(subject.shape, dtype=np.uint16)
    assert subject.region_bytes == region.nbytes
    assert subject.layer_bytes == region.strides[0]
    assert subject.page_bytes == region.strides[1]
    assert subject.page_shape == region.shape[2:]
    assert subject.page_offset(2, 3) == region[2, 3].ctypes.data - region.ctypes.data


def test_the_default_models_page_is_12_kib_in_bfloat16() -> None:
    assert layout(page_size=16, kv_heads=3, head_dim=64).page_bytes == 12 * 1024


@pytest.mark.parametrize("field", ["layers", "pages", "page_size", "kv_heads", "head_dim", "element_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_sizes_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(InvalidKvArgument) as refused:
        layout(**{field: value})
    assert refused.value.status == "INVALID_ARGUMENT"
    assert refused.value.fields == {field: str(value)}


def test_a_latent_page_has_one_head_and_orders_are_known() -> None:
    with pytest.raises(InvalidKvArgument):
        layout("MLA", kv_heads=2)
    with pytest.raises(InvalidKvArgument):
        layout("HDN")  # type: ignore[arg-type]


@pytest.mark.parametrize(("layer", "page"), [(3, 0), (-1, 0), (0, 5), (0, -1)])
def test_offsets_stay_inside_the_region(layer: int, page: int) -> None:
    with pytest.raises(InvalidKvArgument):
        layout().page_offset(layer, page)


@given(st.integers(0, 4095), st.integers(0, 2**32), st.integers(1, 4095))
def test_immediates_survive_the_wire(slot: int, generation: int, extents: int) -> None:
    wire = immediate.encode(slot, generation, extents)
    assert 0 <= wire < 2**32
    assert immediate.decode(wire) == (slot, generation % 256, extents)


@given(st.integers(0, 2**32 - 1))
def test_every_32_bits_decode_into_their_fields(bits: int) -> None:
    slot, generation, extents = immediate.decode(bits)
    assert f"{slot:012b}{generation:08b}{extents:012b}" == f"{bits:032b}"


@pytest.mark.parametrize(
    ("slot", "generation", "extents"), [(4096, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 4096)]
)
def test_immediates_hold_only_what_fits(slot: int, generation: int, extents: int) -> None:
    with pytest.raises(InvalidKvArgument):
        immediate.encode(slot, generation, extents)


@pytest.mark.parametrize("bits", [-1, 2**32])
def test_immediates_have_32_bits(bits: int) -> None:
    with pytest.raises(InvalidKvArgument):
        immediate.decode(bits)
