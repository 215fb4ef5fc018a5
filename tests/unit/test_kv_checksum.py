"""The checksum of a transfer: the same bytes on both sides, however they were cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_fabric._native import Engine, crc32c
from baton_fabric.errors import FabricError
from baton_kv.checksum import destination_runs, source_runs, transfer_tokens, unit_bytes
from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import PageLayout
from baton_kv.plan import plan_pairs
from baton_kv.regions import RegionMap
from baton_kv.shards import ShardMap
from baton_kv.streams import number_pages, page_copies, plan_streams
from baton_memory import SharedMemory


# RFC 3720, B.4.
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_is_the_standard_one(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc32c(data, by_table=True) == crc


@given(st.binary(max_size=300))
def test_instruction_and_table_agree(data: bytes) -> None:
    assert crc32c(data) == crc32c(data, by_table=True)


@pytest.fixture(scope="module")
def engine():
    engine = Engine("tcp", ["127.0.0.1"])
    yield engine
    engine.close()


class Memory:
    def __init__(self, engine: Engine, length: int) -> None:
        self.engine = engine
        self.shared = SharedMemory.create("kv", length)
        self.bytes = np.frombuffer(self.shared.buffer, dtype=np.uint8)
        self.region = engine.register_region(self.shared.fd, length)[0]

    def sum(self, runs, unit: int = 8, salt: int = 1) -> int:
        return self.engine.checksum(self.region, np.asarray(runs, dtype=np.uint64).reshape(-1, 3), unit, salt)

    def close(self) -> None:
        self.engine.deregister_region(self.region)
        del self.bytes
        self.shared.close()


@pytest.fixture
def memory(engine):
    memory = Memory(engine, 4096)
    memory.bytes[:] = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    yield memory
    memory.close()


def test_a_sum_depends_on_bytes_places_and_salt_and_on_nothing_else(memory) -> None:
    for unit in (8, 20, 128):
        whole = memory.sum([(0, 0, 10 * unit)], unit)
        pieces = [(n * unit, n * unit, unit) for n in range(10)]
        assert whole == memory.sum(pieces[::-1], unit) == memory.sum([(0, 0, 7 * unit), *pieces[7:]], unit)
        others = [
            memory.sum([(0, 1, 10 * unit)], unit),
            memory.sum([(1, 0, 10 * unit)], unit),
            memory.sum([(0, 0, 9 * unit)], unit),
            memory.sum([(0, 0, 10 * unit)], unit, salt=2),
            memory.sum([(unit, 0, unit), (0, unit, unit), *pieces[2:]], unit),
        ]
        memory.bytes[5 * unit + 3] ^= 1
        others.append(memory.sum([(0, 0, 10 * unit)], unit))
        memory.bytes[5 * unit + 3] ^= 1
        assert len({whole, *others}) == 7
        assert memory.sum([(0, 0, 10 * unit)], unit) == whole
    assert memory.sum([]) == 0


@pytest.mark.parametrize("run", [(0, 0, 4104), (4096, 0, 8), (2**63, 0, 8), (0, 0, 12), (8, 0, 2**64 - 8)])
def test_nothing_outside_the_region_is_read(memory, run) -> None:
    with pytest.raises(FabricError) as error:
        memory.sum([run])
    assert error.value.reason == "OUT_OF_BOUNDS"


def test_memory_of_a_region_that_does_not_exist_is_refused(memory) -> None:
    with pytest.raises(FabricError) as error:
        memory.engine.checksum(10**6, np.empty((0, 3), np.uint64), 8, 1)
    assert error.value.reason == "UNKNOWN_REGION"


@st.composite
def cases(draw):
    order = draw(st.sampled_from(["HND", "NHD", "MLA"]))
    heads = 1 if order == "MLA" else draw(st.integers(1, 4))

    def tp() -> int:
        more = [heads * n for n in (2, 3)] if order != "MLA" else [2, 3]
        return draw(st.sampled_from([*range(1, heads + 1), *more]))

    page = draw(st.sampled_from([(2, 2), (4, 2), (2, 4), (6, 2), (3, 3)]))
    layers = draw(st.integers(1, 3))
    prefix = draw(st.integers(0, 2)) * page[1]
    prompt = prefix + 1 + draw(st.integers(1, 14))
    return order, heads, tp(), tp(), page, layers, prefix, prompt, draw(st.integers(0, 99))


@settings(max_examples=150)
@given(cases())
def test_both_sides_cover_the_same_bytes(case) -> None:
    order, heads, source_tp, destination_tp, (ours, theirs), layers, prefix, prompt, seed = case
    mla = order == "MLA"
    source, destination = ShardMap(heads, source_tp, mla=mla), ShardMap(heads, destination_tp, mla=mla)
    layout = PageLayout(order, layers, 24, ours, 1, 3, 2)
    there = replace(layout, page_size=theirs)
    rng = np.random.default_rng(seed)
    first = prefix // ours
    source_pages = rng.permutation(24)[: -(-(prompt - 1) // ours) - first].tolist()
    destination_pages = rng.permutation(24)[: -(-(prompt - 1) // theirs) - prefix // theirs].tolist()
    numbers = number_pages(source_pages, destination_pages, ours, theirs, prefix)
    layout, there = source.layout_of(0, layout), destination.layout_of(0, there)
    split = RegionMap.split([1] * layers)
    pairs = plan_pairs(source, destination, layout, there, 0, seed)
    streams = plan_streams(pairs, [RegionMap.whole(layers)] * source.ranks, [split] * destination.ranks)
    units = unit_bytes(layout)
    sent: set[tuple[int, int, int]] = set()
    for stream in streams:
        for _, place, length in source_runs(stream, *numbers).tolist():
            assert length % units == 0
            for unit in range(place, place + length, units):
                key = stream.destination_rank, stream.destination_region, unit
                assert key not in sent
                sent.add(key)
    tokens = transfer_tokens(prompt, prefix, ours, theirs)
    received = set()
    for rank in range(destination.ranks):
        for region, runs in enumerate(
            destination_runs(destination.layout_of(rank, there), split, destination_pages, tokens)
        ):
            for byte, place, length in runs.tolist():
                assert byte == place and length % units == 0
                received |= {(rank, region, unit) for unit in range(place, place + length, units)}
    assert received == sent
    assert page_copies(streams[0], *numbers).shape[1] == 3


@pytest.mark.parametrize(
    ("pages", "tokens"), [([0, 1], 0), ([0, 1], 4), ([0, 1], 9), ([], 1), ([0, 8], 8), ([-1, 2], 8), ([0] * 9, 36)]
)
def test_tokens_that_do_not_end_in_the_last_page_are_refused(pages, tokens) -> None:
    layout = PageLayout("HND", 1, 8, 4, 1, 2, 2)
    with pytest.raises(InvalidKvArgument):
        destination_runs(layout, RegionMap.whole(1), pages, tokens)
    assert [len(runs) for runs in destination_runs(layout, RegionMap.whole(1), [], 0)] == [0]
