"""The paged cache and CPU attention against the same thing written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.attention.cpu import CpuAttention
from baton_model.attention.paging import PADDING_ALLOWANCE, group_by_length
from baton_model.batch import ForwardBatch
from baton_model.cache import KvCache
from baton_model.errors import InvalidBatch
from fresh_cache import fresh_cache


def entry(cache: KvCache, layer: int, page: int, offset: int) -> torch.Tensor:
    """`[2, kv_heads, head_dim]` of one token, by the shape that the layout promises."""
    tensor = cache.tensor[layer, page]
    return tensor[:, :, offset] if cache.order == "HND" else tensor[:, offset]


def dense_attention(queries, keys, values):
    """`[Q, heads, D]` over `[K, kv_heads, D]`, the queries being the last of the K tokens. In float64, one by one."""
    queries, keys, values = (x.to(torch.float64) for x in (queries, keys, values))
    heads, shared = queries.shape[1], queries.shape[1] // keys.shape[1]
    out = torch.empty_like(queries)
    for i in range(len(queries)):
        seen = len(keys) - len(queries) + i + 1
        for head in range(heads):
            scores = keys[:seen, head // shared] @ queries[i, head] * queries.shape[2] ** -0.5
            out[i, head] = scores.softmax(0) @ values[:seen, head // shared]
    return out


@st.composite
def batches(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    sequences = draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(2, 20), st.integers(129, 140))),
            min_size=1,
            max_size=5,
        )
    )
    needed = sum(-(-(past + new) // page_size) for past, new in sequences)
    pages = draw(st.permutations(range(needed + 2)))
    kv_heads, shared = draw(st.sampled_from([(1, 1), (1, 4), (3, 3), (2, 1)]))
    return (
        page_size,
        sequences,
        pages,
        kv_heads,
        shared,
        draw(st.sampled_from(["HND", "NHD"])),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=40)
@given(batches())
def test_any_mix_of_decodes_and_chunks(drawn):
    page_size, sequences, pages, kv_heads, shared, order, seed = drawn
    torch.manual_seed(seed)
    cache = fresh_cache(order, len(pages), page_size, kv_heads)
    cache.tensor.uniform_(-9, 9)
    before = cache.tensor.clone()
    free, tables, history = list(pages), [], []
    for past, new in sequences:
        tables.append([free.pop() for _ in range(-(-(past + new) // page_size))])
        history.append(torch.randn(past + new, 2, kv_heads, 8))
        for token in range(past):
            entry(cache, 1, tables[-1][token // page_size], token % page_size).copy_(history[-1][token])
    stranger = [cache.tensor[1, page].clone() for page in free]

    batch = ForwardBatch.build([([0] * new, past) for past, new in sequences], tables)
    queries = torch.randn(sum(new for _, new in sequences), kv_heads * shared, 8)
    entries = torch.cat([tokens[past:] for tokens, (past, _) in zip(history, sequences, strict=True)])
    out = CpuAttention().plan(batch, cache)(1, queries, entries)

    for (_, new), tokens, rows in zip(
        sequences, history, out.view(queries.shape).split([new for _, new in sequences]), strict=True
    ):
        expected = dense_attention(queries[:new], tokens[:, 0], tokens[:, 1])
        torch.testing.assert_close(rows.to(torch.float64), expected, atol=2e-5, rtol=1e-4)
        queries = queries[new:]
    for table, tokens, (past, _) in zip(tables, history, sequences, strict=True):
        for token in range(len(tokens)):
            assert torch.equal(entry(cache, 1, table[token // page_size], token % page_size), tokens[token])
        for token in range(len(tokens), len(table) * page_size):
            # A page begun in this pass is clear behind its last token.
            if token // page_size * page_size >= past:
                assert not entry(cache, 1, table[token // page_size], token % page_size).any()
    # Neither other sequences' pages nor the other layer were touched.
    assert all(torch.equal(cache.tensor[1, page], was) for page, was in zip(free, stranger, strict=True))
    assert torch.equal(cache.tensor[0], before[0])


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_what_an_earlier_owner_left_cannot_spoil_a_result(order):
    """Two decodes that go together, so that the shorter one is masked; both begin a page that is full of NaN."""
    results = []
    for rubbish in (0.0, float("nan")):
        cache = fresh_cache(order)
        cache.tensor.fill_(rubbish)
        torch.manual_seed(0)
        for sequences in ([([0] * 4, 0), ([0] * 6, 0)], [([0], 4), ([0], 6)]):
            batch = ForwardBatch.build(sequences, [[3, 6], [0, 5]])
            count = len(batch.token_ids)
            results.append(CpuAttention().plan(batch, cache)(0, torch.randn(count, 4, 8), torch.randn(count, 2, 2, 8)))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_bfloat16_in_strided_slices_of_one_projection(order):
    """As a family passes them: queries and entries are slices of the same tensor."""
    torch.manual_seed(0)
    cache = fresh_cache(order, dtype=torch.bfloat16)
    projected = torch.randn(6, 8, 8).to(torch.bfloat16)
    batch = ForwardBatch.build([([0] * 5, 0), ([0], 0)], [[3, 6], [0]])
    out = CpuAttention().plan(batch, cache)(0, projected[:, :4], projected[:, 4:].view(6, 2, 2, 8))
    assert out.dtype == torch.bfloat16
    expected = dense_attention(projected[:5, :4], projected[:5, 4:6], projected[:5, 6:])
    torch.testing.assert_close(out[:5].view(5, 4, 8).to(torch.float64), expected, atol=2e-2, rtol=2e-2)


def test_the_cache_is_the_callers_memory():
    memory = np.zeros(2 * 8 * 2 * 2 * 4 * 8, dtype=np.float32)
    cache = KvCache(memory, order="HND", layers=2, pages=8, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    rows = cache.token_rows(torch.tensor([5]), torch.tensor([2]))
    cache.write(1, rows, torch.arange(32, dtype=torch.float32).view(1, 2, 2, 8))
    seen = memory.reshape(2, 8, 2, 2, 4, 8)
    assert (seen[1, 5, :, :, 2].ravel() == np.arange(32)).all()
    assert np.count_nonzero(memory) == 31


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_gather_brings_pages_in_the_order_of_the_tables(order):
    cache = fresh_cache(order)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    tables = [[4, 0, 7], [2, 4, 4]]
    keys, values = cache.gather(1, cache.page_rows(tables), 2)
    assert keys.shape == values.shape == (2, 2, 12, 8)
    for sequence, table in enumerate(tables):
        for token in range(12):
            expected = entry(cache, 1, table[token // 4], token % 4)
            assert torch.equal(keys[sequence, :, token], expected[0])
            assert torch.equal(values[sequence, :, token], expected[1])


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(0, 600))
def test_groups_partition_and_pad_little(lengths, allowance):
    groups = group_by_length(lengths, allowance)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert sum(longest - lengths[i] for i in group) <= allowance


def test_sequences_of_like_length_go_together():
    assert group_by_length([100, 101, 99, 100], PADDING_ALLOWANCE) == [[1, 0, 3, 2]]
    assert group_by_length([2000, 20, 1999, 30], PADDING_ALLOWANCE) == [[0, 2], [3, 1]]


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (ForwardBatch.build([([1, 2], 3)], [[0]]), "has 1 pages; its 5 tokens need 2"),
        (ForwardBatch.build([([1], 0)], [[8]]), "page 8"),
        (ForwardBatch.build([([1], 0)], [[-1]]), "page -1"),
        (ForwardBatch(torch.tensor([1]), torch.tensor([0]), [1], [1], torch.tensor([[9]])), "page 9"),
    ],
)
def test_pages_are_checked_before_anything_is_written(batch, complaint):
    with pytest.raises(InvalidBatch, match=complaint):
        CpuAttention().plan(batch, fresh_cache())


def test_a_page_table_may_be_a_tensor():
    batch = ForwardBatch(
        torch.tensor([1, 2]), torch.tensor([0, 0]), [1, 1], [1, 1], torch.tensor([[5, 0], [6, 0]], dtype=torch.int32)
    )
    cache = fresh_cache()
    CpuAttention().plan(batch, cache)(0, torch.ones(2, 2, 8), torch.ones(2, 2, 2, 8))
    assert cache.tensor[0].flatten(1).count_nonzero(1).tolist() == [0, 0, 0, 0, 0, 32, 32, 0]


def test_a_cache_that_does_not_fit_its_buffer():
    with pytest.raises(InvalidBatch, match="8191"):
        KvCache(
            bytearray(8191), order="HND", layers=2, pages=8, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32
        )
    with pytest.raises(InvalidBatch, match="order"):
        KvCache(
            bytearray(8192), order="MLA", layers=2, pages=8, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32
        )
