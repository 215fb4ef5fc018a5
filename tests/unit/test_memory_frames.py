"""Frames and offers of the hand-off: what is taken, and what is refused, byte by byte."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_memory.errors import FrameInvalid, OfferInvalid
from baton_memory.frames import HEAD, MAGIC, MAX_BODY, MAX_DESCRIPTORS, VERSION, FrameReader, encode_frame
from baton_memory.offer import parse_offer, region_bytes

OFFER = {
    "session": 7,
    "rank": 0,
    "ranks": 1,
    "data_parallel": 1,
    "layout": {
        "order": "HND",
        "layers": 2,
        "pages": 3,
        "page_size": 4,
        "kv_heads": 5,
        "kv_heads_total": 5,
        "head_dim": 6,
        "element_size": 2,
        "dtype": "bfloat16",
    },
    "regions": [{"name": "kv", "length": 2880}],
}

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.text(), values, max_size=5), st.integers(0, MAX_DESCRIPTORS), st.data())
def test_a_frame_survives_any_fragmentation(body, descriptors, data):
    wire = encode_frame(body, descriptors)
    reader, frame, at = FrameReader(), None, 0
    while at < len(wire):
        assert frame is None
        end = data.draw(st.integers(at + 1, len(wire)))
        frame, at = reader.feed(wire[at:end]), end
    assert frame is not None
    assert (frame.body, frame.descriptors) == (body, descriptors)


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (b"GET / HTTP/1.1", "BATN"),
        (b"X", "BATN"),
        (HEAD.pack(MAGIC, VERSION + 1, 0, 2) + b"{}", "version"),
        (HEAD.pack(MAGIC, VERSION, 0, MAX_BODY + 1), "at most"),
        (HEAD.pack(MAGIC, VERSION, MAX_DESCRIPTORS + 1, 2), "at most"),
        (HEAD.pack(MAGIC, VERSION, 0, 2) + b"{}more", "after the end"),
        (HEAD.pack(MAGIC, VERSION, 0, 2) + b"{]", "not JSON"),
        (HEAD.pack(MAGIC, VERSION, 0, 2) + b"\xff\xff", "not JSON"),
        (HEAD.pack(MAGIC, VERSION, 0, 2) + b"[]", "not an object"),
        (HEAD.pack(MAGIC, VERSION, 0, 60_000) + b"[" * 60_000, "not JSON"),
    ],
)
def test_malformed_frames(wire, says):
    with pytest.raises(FrameInvalid, match=says):
        FrameReader().feed(wire)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_awaited(data):
    with contextlib.suppress(FrameInvalid):
        FrameReader().feed(data)


def test_frames_above_the_limits_are_not_made():
    with pytest.raises(FrameInvalid):
        encode_frame({"x": "y" * MAX_BODY})
    with pytest.raises(FrameInvalid):
        encode_frame({}, MAX_DESCRIPTORS + 1)


def test_an_offer_of_a_region_for_each_layer():
    offer = parse_offer({**OFFER, "regions": [{"name": "kv", "length": 1440, "layers": 1}] * 2})
    assert (offer.region_layers, offer.kv_length, offer.descriptors) == ([1, 1], 2880, 4)
    assert parse_offer(offer.to_json()) == offer


def test_a_right_offer():
    offer = parse_offer(OFFER)
    assert offer.to_json() == OFFER
    assert offer.kv_length == region_bytes(offer.layout) == 2 * 3 * 2 * 4 * 5 * 6 * 2
    assert offer.descriptors == 3
    assert region_bytes({**OFFER["layout"], "order": "MLA", "kv_heads": 1}) == 2 * 3 * 4 * 6 * 2


def test_an_offer_says_on_which_gpu_its_memory_is():
    assert parse_offer({**OFFER, "regions": [{"name": "kv", "length": 2880, "kind": "host"}]}).device is None
    region = {"name": "kv", "length": 2880, "kind": "cuda", "device": "GPU-1"}
    offer = parse_offer({**OFFER, "regions": [region]})
    assert offer.device == "GPU-1"
    assert offer.to_json()["regions"] == [region]


@pytest.mark.parametrize(
    "change",
    [
        {"session": 0},
        {"session": 2**64},
        {"session": "7"},
        {"rank": 1},
        {"rank": -1},
        {"rank": True},
        {"ranks": 0},
        {"ranks": 257},
        {"ranks": 3, "data_parallel": 2},
        {"data_parallel": None},
        {"layout": None},
        {"layout": {**OFFER["layout"], "order": "XYZ"}},
        {"layout": {**OFFER["layout"], "dtype": ""}},
        {"layout": {**OFFER["layout"], "dtype": 3}},
        {"layout": {**OFFER["layout"], "layers": 0}},
        {"layout": {**OFFER["layout"], "pages": 2**40}},
        {"layout": {**OFFER["layout"], "head_dim": 1.5}},
        {"layout": {**OFFER["layout"], "kv_heads_total": 4}},
        {"regions": None},
        {"regions": []},
        {"regions": [3]},
        {"regions": [{"name": "kv", "length": 2879}]},
        {"regions": [{"name": "other", "length": 2880}]},
        {"regions": [{"name": "kv", "length": 2880}] * 2},
        {"regions": [{"name": "kv", "length": 1440, "layers": 1}]},
        {"regions": [{"name": "kv", "length": 2880, "layers": 2}, {"name": "kv", "length": 1440, "layers": 1}]},
        {"regions": [{"name": "kv", "length": 1440, "layers": 1}, {"name": "kv", "length": 1439, "layers": 1}]},
        {"regions": [{"name": "kv", "length": 4320, "layers": 3}, {"name": "kv", "length": 2880, "layers": -1}]},
        {
            "regions": [
                {"name": "kv", "length": 1440, "layers": 1},
                {"name": "kv", "length": 1440, "layers": 1, "kind": "cuda", "device": "GPU-1"},
            ]
        },
        {"regions": [{**OFFER["regions"][0], "kind": "rocm"}]},
        {"regions": [{**OFFER["regions"][0], "kind": None}]},
        {"regions": [{**OFFER["regions"][0], "kind": "cuda"}]},
        {"regions": [{**OFFER["regions"][0], "kind": "cuda", "device": 0}]},
        {"regions": [{**OFFER["regions"][0], "kind": "cuda", "device": "GPU-" + "0" * 61}]},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_wrong_offers(change):
    with pytest.raises(OfferInvalid) as error:
        parse_offer({**OFFER, **change})
    assert error.value.reason == "HANDOFF_INVALID"
