"""FlashInfer's attention as Baton plans it: on an interpreter of FlashInfer's plans, against attention on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_flashinfer
from baton_model.attention.cpu import CpuAttention
from baton_model.attention.flashinfer import FlashInferAttention
from baton_model.attention.paged_plan import padded, plan_pages
from baton_model.batch import ForwardBatch
from baton_model.cache import LatentCache
from baton_model.errors import InvalidBatch
from baton_model.layers.latent import LatentHeads
from fresh_cache import fresh_cache
from recorded_graph import RecordedGraph

CPU = torch.device("cpu")
HEAD_DIM = 8


def make_batch(sequences: list[tuple[int, int]], page_size: int, pages: list[int]) -> ForwardBatch:
    """`sequences`: tokens in the cache already, and new ones. Pages are taken from the end of `pages`."""
    tables = [[pages.pop() for _ in range(-(-(past + new) // page_size))] for past, new in sequences]
    return ForwardBatch.build([([0] * new, past) for past, new in sequences], tables)


@st.composite
def batches(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    new = st.one_of(st.just(1), st.integers(2, 20)) if draw(st.booleans()) else st.just(1)
    sequences = draw(st.lists(st.tuples(st.integers(0, 40), new), min_size=1, max_size=5))
    needed = sum(-(-(past + new) // page_size) for past, new in sequences)
    pages = draw(st.permutations(range(needed + 2)))
    heads = draw(st.sampled_from([(1, 1), (1, 4), (3, 3), (2, 5)]))
    return page_size, sequences, pages, heads, draw(st.sampled_from(["HND", "NHD"])), draw(st.integers(0, 99))


@settings(max_examples=60)
@given(batches())
def test_a_plan_says_where_every_token_lies(drawn):
    page_size, sequences, pages, *_ = drawn
    batch = make_batch(sequences, page_size, list(pages))
    plan = plan_pages(batch, page_size, len(pages))
    for i, (past, new) in enumerate(sequences):
        rows = slice(*plan.query_indptr[i : i + 2].tolist())
        assert plan.rows[rows].tolist() == [i] * new
        assert plan.positions[rows].tolist() == list(range(past, past + new))
        assert plan.page_indices[slice(*plan.page_indptr[i : i + 2].tolist())].tolist() == list(batch.page_tables[i])
        full = int(plan.page_indptr[i + 1] - plan.page_indptr[i]) - 1
        places = [batch.page_tables[i][t // page_size] * page_size + t % page_size for t in range(past, past + new)]
        assert plan.slots[rows].tolist() == places
        assert 1 <= plan.last_page_lens[i] <= page_size
        assert full * page_size + int(plan.last_page_lens[i]) == int(plan.context_lens[i]) == past + new
    assert plan.decode == all(new == 1 for _, new in sequences)


@settings(max_examples=40)
@given(batches())
def test_flashinfer_and_the_cpu_agree_in_every_bit_of_the_cache(drawn):
    page_size, sequences, pages, (kv_heads, shared), order, seed = drawn
    torch.manual_seed(seed)
    batch = make_batch(sequences, page_size, list(pages))
    ours, theirs = (fresh_cache(order, len(pages), page_size, kv_heads) for _ in range(2))
    ours.tensor.uniform_(-2, 2)
    theirs.tensor.copy_(ours.tensor)
    # One after the other as a product gives them: queries, then keys and values.
    heads = torch.randn(len(batch.token_ids), kv_heads * (shared + 2), HEAD_DIM)
    queries = heads[:, : kv_heads * shared]
    entries = heads[:, kv_heads * shared :].view(len(heads), 2, kv_heads, HEAD_DIM)
    expected, found = [], []
    cpu = CpuAttention().plan(batch, theirs)
    flashinfer = FlashInferAttention(fake_flashinfer, CPU).plan(batch, ours)
    for layer in range(2):
        expected.append(cpu(layer, queries, entries))
        found.append(flashinfer(layer, queries, entries))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(ours.tensor, theirs.tensor)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([1, 4]))
def test_a_padded_batch_computes_and_stores_the_same(pasts, missing, page_size):
    pages = list(range(40 * len(pasts)))
    batch = make_batch([(past, 1) for past in pasts], page_size, pages)
    queries, entries = torch.randn(len(pasts), 2, HEAD_DIM), torch.randn(len(pasts), 2, 2, HEAD_DIM)
    more = padded(batch, len(pasts) + missing)
    repeated = [*range(len(pasts)), *[pasts.index(min(pasts))] * missing]
    results = []
    for each, rows in ((batch, list(range(len(pasts)))), (more, repeated)):
        cache = fresh_cache("HND", 40 * len(pasts), page_size, 2)
        out = FlashInferAttention(fake_flashinfer, CPU).plan(each, cache)(0, queries[rows], entries[rows])
        results.append((out[: len(pasts)], cache.tensor))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    more.validate()


LATENT, NOPE, ROPE, VALUE = 12, 5, 4, 6


def latent_cache(pages: int, page_size: int) -> LatentCache:
    size = 2 * pages * page_size * (LATENT + ROPE) * 4
    return LatentCache(
        bytearray(size), layers=2, pages=pages, page_size=page_size, width=LATENT + ROPE, dtype=torch.float32
    )


def latent_inputs(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, LatentHeads]:
    return (
        torch.randn(tokens, heads, NOPE + ROPE),
        torch.randn(tokens, LATENT + ROPE),
        LatentHeads(torch.randn(heads, NOPE, LATENT), torch.randn(heads, LATENT, VALUE), 0.3),
    )


@settings(max_examples=30)
@given(batches())
def test_latent_attention_agrees_too(drawn):
    page_size, sequences, pages, (heads, _), _, seed = drawn
    torch.manual_seed(seed)
    batch = make_batch(sequences, page_size, list(pages))
    ours, theirs = (latent_cache(len(pages), page_size) for _ in range(2))
    ours.tensor.uniform_(-2, 2)
    theirs.tensor.copy_(ours.tensor)
    queries, entries, projections = latent_inputs(len(batch.token_ids), heads)
    flashinfer = FlashInferAttention(fake_flashinfer, CPU).plan_latent(batch, ours)
    cpu = CpuAttention().plan_latent(batch, theirs)
    for layer in range(2):
        found, expected = (step(layer, queries, entries, projections) for step in (flashinfer, cpu))
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-3)
    assert torch.equal(ours.tensor, theirs.tensor)


def test_a_captured_latent_step_attends_to_what_it_is_loaded_with():
    backend, cache, expected = FlashInferAttention(fake_flashinfer, CPU), latent_cache(8, 4), latent_cache(8, 4)
    queries, entries, projections = latent_inputs(2, 3)
    step, graph = backend.decode_step(cache, 2, 8), RecordedGraph()
    step.reload(backend.plan_pages(ForwardBatch.build([([0], 0), ([0], 0)], [[0], [0]]), cache))
    step(0, queries, entries, projections)
    with torch.inference_mode(), graph.capture():
        out = step(0, queries, entries, projections)
    for lengths in ((5, 2), (6, 0)):
        batch = ForwardBatch.build([([0], length) for length in lengths], [[3, 1], [7]])
        for each in (cache, expected):
            each.tensor.uniform_(-2, 2, generator=torch.Generator().manual_seed(5))
        step.reload(backend.plan_pages(batch, cache))
        graph.replay()
        want = CpuAttention().plan_latent(batch, expected)(0, queries, entries, projections)
        torch.testing.assert_close(out, want, atol=5e-4, rtol=1e-3)
        assert torch.equal(cache.tensor[0], expected.tensor[0])


def test_pages_outside_the_cache_are_refused():
    batch = ForwardBatch.build([([1], 3)], [[7]])
    with pytest.raises(InvalidBatch, match="names page 7; the cache has pages 0 to 3"):
        FlashInferAttention(fake_flashinfer, CPU).plan(batch, fresh_cache("HND", 4, 4, 1))
