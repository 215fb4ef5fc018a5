"""The paged latent cache, and attention over it, against multi-head attention written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.attention.cpu import CpuAttention
from baton_model.attention.cpu_latent import expanding_pays
from baton_model.batch import ForwardBatch
from baton_model.cache import CacheShape, KvCache, LatentCache, open_cache
from baton_model.errors import InvalidBatch
from baton_model.layers.latent import LatentHeads

LATENT, ROPE, NOPE, VALUE = 6, 4, 5, 3
WIDTH = LATENT + ROPE


def make_cache(pages=8, page_size=4, width=WIDTH, dtype=torch.float32) -> LatentCache:
    return LatentCache(
        bytearray(2 * pages * page_size * width * dtype.itemsize),
        layers=2,
        pages=pages,
        page_size=page_size,
        width=width,
        dtype=dtype,
    )


def make_heads(count: int, value=VALUE, dtype=torch.float32) -> LatentHeads:
    return LatentHeads(
        torch.randn(count, NOPE, LATENT).to(dtype), torch.randn(count, LATENT, value).to(dtype), (NOPE + ROPE) ** -0.5
    )


def dense_attention(queries, entries, heads: LatentHeads):
    """`[Q, heads, nope + rope]` over entries `[T, latent + rope]`, the queries being the last of the T tokens: keys and
    values of every head made as the paper defines them, in float64, one by one."""
    queries, entries = queries.double(), entries.double()
    out = []
    for i, query in enumerate(queries):
        seen = entries[: len(entries) - len(queries) + i + 1]
        for head in range(len(heads.key_up)):
            keys = torch.cat((seen[:, :LATENT] @ heads.key_up[head].double().T, seen[:, LATENT:]), dim=1)
            weights = (keys @ query[head] * heads.scale).softmax(0)
            out.append(weights @ (seen[:, :LATENT] @ heads.value_up[head].double()))
    return torch.stack(out).view(len(queries), -1)


@st.composite
def batches(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    # A short chunk behind a long context absorbs, a long one expands.
    lengths = st.one_of(st.just(1), st.integers(2, 20), st.integers(129, 140))
    sequences = draw(st.lists(st.tuples(st.integers(0, 200), lengths), min_size=1, max_size=5))
    needed = sum(-(-(past + new) // page_size) for past, new in sequences)
    return page_size, sequences, draw(st.permutations(range(needed + 2))), draw(st.integers(1, 3)), draw(st.integers(0))


@settings(max_examples=30)
@given(batches(), st.sampled_from([VALUE, NOPE + ROPE]))
def test_any_mix_of_decodes_and_chunks(drawn, value):
    page_size, sequences, pages, heads_count, seed = drawn
    torch.manual_seed(seed % 2**32)
    heads, cache = make_heads(heads_count, value), make_cache(len(pages), page_size)
    cache.tensor.uniform_(-9, 9)
    before = cache.tensor.clone()
    free, tables, history = list(pages), [], []
    for past, new in sequences:
        tables.append([free.pop() for _ in range(-(-(past + new) // page_size))])
        history.append(torch.randn(past + new, WIDTH))
        for token in range(past):
            cache.tensor[1, tables[-1][token // page_size], token % page_size] = history[-1][token]

    batch = ForwardBatch.build([([0] * new, past) for past, new in sequences], tables)
    queries = torch.randn(len(batch.token_ids), heads_count, NOPE + ROPE)
    entries = torch.cat([tokens[past:] for tokens, (past, _) in zip(history, sequences, strict=True)])
    out = CpuAttention().plan_latent(batch, cache)(1, queries, entries, heads)

    for table, tokens, (past, new) in zip(tables, history, sequences, strict=True):
        expected = dense_attention(queries[:new], tokens, heads)
        torch.testing.assert_close(out[:new].double(), expected, atol=1e-4, rtol=1e-4)
        out, queries = out[new:], queries[new:]
        stored = cache.tensor[1, table].flatten(0, 1)
        assert torch.equal(stored[: len(tokens)], tokens)
        # A page begun in this pass is clear behind its last token.
        if (len(table) - 1) * page_size >= past:
            assert not stored[len(tokens) :].any()
    # Neither other sequences' pages nor the other layer were touched.
    assert torch.equal(cache.tensor[1, free], before[1, free])
    assert torch.equal(cache.tensor[0], before[0])


def test_what_an_earlier_owner_left_cannot_spoil_a_result():
    """Two decodes that go together, so that the shorter one is masked; both begin a page that is full of NaN."""
    results = []
    for rubbish in (0.0, float("nan")):
        cache = make_cache()
        cache.tensor.fill_(rubbish)
        torch.manual_seed(0)
        heads = make_heads(2)
        for sequences in ([([0] * 4, 0), ([0] * 6, 0)], [([0], 4), ([0], 6)]):
            batch = ForwardBatch.build(sequences, [[3, 6], [0, 5]])
            count = len(batch.token_ids)
            step = CpuAttention().plan_latent(batch, cache)
            results.append(step(0, torch.randn(count, 2, NOPE + ROPE), torch.randn(count, WIDTH), heads))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("sequences", [1, 2])
def test_rubbish_behind_the_last_token_of_a_page_begun_elsewhere(sequences):
    """As where smaller pages arrived from another worker: the rest of the page is as its earlier owner left it."""
    results = []
    for rubbish in (0.0, float("nan")):
        cache = make_cache()
        cache.tensor.fill_(rubbish)
        torch.manual_seed(0)
        cache.tensor[0, [3, 6]] = torch.randn(2, 4, WIDTH)
        cache.tensor[0, 6, 2:] = rubbish
        cache.tensor[0, 5, :1] = torch.randn(WIDTH)
        batch = ForwardBatch.build([([0], 5), ([0], 1)][:sequences], [[3, 6], [5]][:sequences])
        step, heads = CpuAttention().plan_latent(batch, cache), make_heads(2)
        queries, entries = torch.randn(2, 2, NOPE + ROPE), torch.randn(2, WIDTH)
        results.append(step(0, queries[:sequences], entries[:sequences], heads))
    assert results[0].isfinite().all() and torch.equal(*results)


def test_bfloat16_in_strided_slices_of_one_projection():
    torch.manual_seed(0)
    heads, cache = make_heads(2, dtype=torch.bfloat16), make_cache(dtype=torch.bfloat16)
    projected = torch.randn(6, 2 * (NOPE + ROPE) + WIDTH).to(torch.bfloat16)
    queries, entries = projected[:, : 2 * (NOPE + ROPE)].view(6, 2, -1), projected[:, 2 * (NOPE + ROPE) :]
    batch = ForwardBatch.build([([0] * 5, 0), ([0], 0)], [[3, 6], [0]])
    out = CpuAttention().plan_latent(batch, cache)(0, queries, entries, heads)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[:5].double(), dense_attention(queries[:5], entries[:5], heads), atol=5e-2, rtol=5e-2)


def test_long_chunks_expand_and_short_ones_behind_long_contexts_absorb():
    """DeepSeek-V3's sizes: expanding a token costs as much as 170 of the products that absorbing adds."""
    heads = LatentHeads(torch.empty(1, 128, 512), torch.empty(1, 512, 128), 1.0)
    assert expanding_pays(512, 512, heads)
    assert expanding_pays(256, 4096, heads)
    assert not expanding_pays(128, 4096, heads)
    assert not expanding_pays(2, 100, heads)


def test_the_cache_is_the_callers_memory_a_vector_a_token():
    memory = np.zeros(2 * 8 * 4 * WIDTH, dtype=np.float32)
    cache = open_cache(
        memory, CacheShape(2, 1, WIDTH, latent=True), order="HND", pages=8, page_size=4, dtype=torch.float32
    )
    assert isinstance(cache, LatentCache) and cache.order == "MLA"
    cache.write(1, cache.token_rows(torch.tensor([5]), torch.tensor([2])), torch.arange(1, WIDTH + 1.0)[None])
    assert (memory.reshape(2, 8, 4, WIDTH)[1, 5, 2] == np.arange(1, WIDTH + 1)).all()
    assert np.count_nonzero(memory) == WIDTH
    gathered = cache.gather(1, cache.page_rows([[5, 0], [0, 5]]), 2)
    assert gathered.shape == (2, 8, WIDTH)
    assert torch.equal(gathered[0, 2], gathered[1, 6]) and gathered[0, 2, 0] == 1


def test_a_model_with_keys_and_values_gets_a_cache_of_them():
    cache = open_cache(bytearray(8192), CacheShape(2, 2, 8), order="NHD", pages=8, page_size=4, dtype=torch.float32)
    assert isinstance(cache, KvCache) and cache.order == "NHD"


def test_a_cache_that_does_not_fit_its_buffer():
    with pytest.raises(InvalidBatch, match="2559 bytes"):
        LatentCache(bytearray(2559), layers=2, pages=8, page_size=4, width=WIDTH, dtype=torch.float32)
    with pytest.raises(InvalidBatch, match="not possible"):
        LatentCache(bytearray(2560), layers=0, pages=8, page_size=4, width=WIDTH, dtype=torch.float32)


def test_pages_are_checked_before_anything_is_written():
    with pytest.raises(InvalidBatch, match="page 8"):
        CpuAttention().plan_latent(ForwardBatch.build([([1], 0)], [[8]]), make_cache())
