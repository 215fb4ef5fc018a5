"""The native kernels of layers against torch, for every instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model import _kernels
from baton_model.attention.cpu import CpuAttention
from baton_model.batch import ForwardBatch
from baton_model.layers.cpu_operators import CpuOperators
from baton_model.layers.operators import TorchOperators
from fresh_cache import fresh_cache

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return found.dtype == expected.dtype and torch.allclose(found.float(), expected.float(), tolerance, tolerance)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 100), DTYPES, st.integers(0, 9))
def test_rms_norm(rows, size, dtype, seed):
    x, weight = random(rows, size, seed=seed, dtype=dtype), random(size, seed=seed + 1, dtype=dtype)
    expected = TorchOperators().rms_norm(x.float(), weight.float(), 1e-5).to(dtype)
    assert close(CpuOperators().rms_norm(x, weight, 1e-5), expected)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 100), DTYPES, st.sampled_from([0.1, 1.0, 100.0]))
def test_silu_and_mul(rows, inner, dtype, size):
    gate_up = random(rows, 2 * inner, dtype=dtype) * size
    assert close(CpuOperators().silu_and_mul(gate_up), TorchOperators().silu_and_mul(gate_up.float()).to(dtype))


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), DTYPES)
def test_rotation_of_some_heads_in_place(rows, heads, half, dtype):
    x, angles = random(rows, heads + 2, 2 * half, dtype=dtype), random(rows, 1, half, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    expected = x.float()
    TorchOperators().rotate(expected[:, :heads], cos.float(), sin.float())
    CpuOperators().rotate(x[:, :heads], cos, sin)
    assert close(x, expected.to(dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_may_be_shared_by_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = random(700, 256)
        assert close(
            CpuOperators().rms_norm(x, torch.ones(256), 1e-5), TorchOperators().rms_norm(x, torch.ones(256), 1e-5)
        )
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25)
@given(
    st.sampled_from([6, 16, 20, 64, 80, 128]),
    DTYPES,
    st.sampled_from(["HND", "NHD"]),
    st.integers(1, 7),
    st.integers(0, 300),
    st.sampled_from([1, 2, 65, 130]),
)
def test_attention_of_any_head_size_is_torchs(head_dim, dtype, order, group, past, new):
    kv_heads, page_size = 2, 16
    pages = -(-(past + new) // page_size)
    cache = fresh_cache(order, pages, page_size, kv_heads, head_dim, layers=1, dtype=dtype)
    tokens = random(past + new, 2, kv_heads, head_dim, dtype=dtype)
    queries = random(past + new, kv_heads * group, head_dim, seed=1, dtype=dtype)
    if past:
        batch = ForwardBatch.build([([0] * past, 0)], [list(range(pages))])
        CpuAttention().plan(batch, cache)(0, queries[:past], tokens[:past])
    batch = ForwardBatch.build([([0] * new, past)], [list(range(pages))])
    found = CpuAttention().plan(batch, cache)(0, queries[past:], tokens[past:])
    heads, keys, values = (x.float().transpose(0, 1)[None] for x in (queries[past:], tokens[:, 0], tokens[:, 1]))
    seen = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, keys, values, seen, enable_gqa=True)
    assert close(found.view(new, -1, head_dim), expected[0].transpose(0, 1).to(dtype))


@settings(max_examples=40)
@given(
    st.sampled_from([32, 64, 96, 128]),
    st.sampled_from(["HND", "NHD"]),
    st.integers(1, 3),
    st.integers(1, 13),
    st.sampled_from([1, 5, 16, 64]),
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_decodes_are_torchs_each_by_itself(head_dim, order, kv_heads, group, page_size, contexts, seed):
    """In bfloat16, behind pages in any order, among which others hold what is no number. Neither what shares the batch
    nor the number of threads changes a bit."""
    needed = [-(-context // page_size) for context in contexts]
    pages = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[pages.pop() for _ in range(count)] for count in needed]
    cache = fresh_cache(order, sum(needed) + 2, page_size, kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    cache.tensor.fill_(torch.nan)
    tokens = [random(n, 2, kv_heads, head_dim, seed=seed + n, dtype=torch.bfloat16) for n in contexts]
    for table, entries in zip(tables, tokens, strict=True):
        for i, entry in enumerate(entries):
            page = cache.tensor[0, table[i // page_size]]
            (page[:, :, i % page_size] if order == "HND" else page[:, i % page_size]).copy_(entry)
    queries = 2 * random(len(contexts), kv_heads * group, head_dim, seed=seed, dtype=torch.bfloat16)
    new = torch.stack([entries[-1] for entries in tokens])

    def decode(chosen: range) -> torch.Tensor:
        sequences = [([0], contexts[i] - 1) for i in chosen]
        batch = ForwardBatch.build(sequences, [tables[i] for i in chosen])
        rows = slice(chosen.start, chosen.stop)
        return CpuAttention().plan(batch, cache)(0, queries[rows], new[rows]).view(len(chosen), -1, head_dim)

    found = decode(range(len(contexts)))
    for i, entries in enumerate(tokens):
        heads, keys, values = (x.float().transpose(0, 1)[None] for x in (queries[i : i + 1], *entries.unbind(1)))
        expected = torch.nn.functional.scaled_dot_product_attention(heads, keys, values, enable_gqa=True)
        assert close(found[i], expected[0, :, 0].to(torch.bfloat16))
        assert torch.equal(decode(range(i, i + 1))[0], found[i])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(decode(range(len(contexts))), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avxvnni", "avx512", "avx512vnni"])
def test_other_instruction_sets(instruction_set):
    """This file and those of attention and linears, with kernels that this processor would not choose."""
    if instruction_set == _kernels.instruction_set():
        return
    others = ["test_model_attention.py", "test_model_linear.py"]
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in others)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "not other_instruction_sets", *files],
        env={**os.environ, "BATON_KERNELS": instruction_set},
        capture_output=True,
        text=True,
        check=False,
    )
    if "this processor runs" in ran.stdout:
        pytest.skip(f"this processor has no {instruction_set}")
    assert ran.returncode == 0, ran.stdout[-4000:]
