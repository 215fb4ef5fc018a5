"""FlashInfer's functions as Baton calls them, written out in torch: slow, on any device, in float64.

Only the parameters that Baton passes; tests/unit/test_flashinfer_signatures.py compares them with the real package.
It objects to what the real kernels object to or, worse, don't: index types, strides, layouts, a run without a plan.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from recorded_graph import kernel


def _indices(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
        assert tensor.dim() == 1
        assert tensor.is_contiguous()


def _entry(pool: torch.Tensor, layout: str, page: int, offset: int) -> torch.Tensor:
    """`[2, kv_heads, head_dim]` of one token."""
    return pool[page, :, :, offset] if layout == "HND" else pool[page, :, offset]


def _check_layout(layout: str) -> None:
    assert layout in ("HND", "NHD"), layout


@kernel
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    _check_layout(kv_layout)
    _indices(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert append_key.stride(-1) == append_value.stride(-1) == 1
    assert paged_kv_cache.is_contiguous()
    assert len(batch_indices) == len(positions) == len(append_key) == len(append_value)
    page_size = paged_kv_cache.shape[3 if kv_layout == "HND" else 2]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[row]) + position // page_size])
        place = _entry(paged_kv_cache, kv_layout, page, position % page_size)
        place[0], place[1] = append_key[token], append_value[token]


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """`[Q, heads, D]` over `[K, kv_heads, D]`, the queries being the last of the K tokens."""
    count, heads, _ = queries.shape
    shared = heads // keys.shape[1]
    keys, values = (x.double().repeat_interleave(shared, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    seen = torch.ones(count, len(keys), dtype=torch.bool, device=queries.device).tril(len(keys) - count)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


class _Paged:
    """What both wrappers share. The plan lies in tensors, as it does on a GPU, so that a captured run reads them."""

    _indptr: torch.Tensor
    _page_indices: torch.Tensor
    _last: torch.Tensor

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        _check_layout(layout)
        self._layout = layout
        self._sizes: tuple[int, int, int, int] | None = None

    def _plan_sizes(self, sizes: tuple[int, int, int, int], types: tuple[torch.dtype, torch.dtype]) -> None:
        heads, kv_heads, _, _ = sizes
        assert heads % kv_heads == 0
        assert types[0] == types[1]
        self._sizes, self._type = sizes, types[0]

    def _run(self, q: torch.Tensor, pool: torch.Tensor, query_indptr: torch.Tensor) -> torch.Tensor:
        assert self._sizes is not None, "run without a plan"
        heads, kv_heads, head_dim, page_size = self._sizes
        assert q.shape == (int(query_indptr[-1]), heads, head_dim)
        assert q.dtype == pool.dtype == self._type
        assert q.stride(-1) == 1
        inner = (kv_heads, page_size) if self._layout == "HND" else (page_size, kv_heads)
        assert pool.shape[1:] == (2, *inner, head_dim)
        out = torch.empty_like(q)
        for row in range(len(self._last)):
            first, last = self._indptr[row : row + 2].tolist()
            pages = pool[self._page_indices[first:last].long()]
            tokens = pages.transpose(2, 3) if self._layout == "HND" else pages
            tokens = tokens.transpose(1, 2).flatten(0, 1)[: (last - first - 1) * page_size + int(self._last[row])]
            start, stop = query_indptr[row : row + 2].tolist()
            out[start:stop] = _attend(q[start:stop], tokens[:, 0], tokens[:, 1], head_dim**-0.5)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._graph = use_cuda_graph
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._indptr, self._page_indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self._last = paged_kv_last_page_len_buffer
            _indices(self._indptr, self._page_indices, self._last)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        _indices(indptr, indices, last_page_len)
        assert len(indptr) == len(last_page_len) + 1
        self._plan_sizes((num_qo_heads, num_kv_heads, head_dim, page_size), (q_data_type, kv_data_type))
        if self._graph:
            assert len(last_page_len) == len(self._last), "the batch size of a graph's wrapper is fixed"
            self._indptr.copy_(indptr)
            self._page_indices[: len(indices)].copy_(indices)
            self._last.copy_(last_page_len)
        else:
            self._indptr, self._page_indices, self._last = indptr, indices, last_page_len

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        return self._attend_all(q, paged_kv_cache)

    @kernel
    def _attend_all(self, q: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        return self._run(q, pool, torch.arange(len(self._last) + 1))


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        _indices(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        self._plan_sizes((num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type))
        self._query_indptr = qo_indptr
        self._indptr, self._page_indices, self._last = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        return self._run(q, paged_kv_cache, self._query_indptr)


@kernel
def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    assert input.dim() in (2, 3)
    assert input.dtype == weight.dtype
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


@kernel
def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    assert input.stride(-1) == 1
    gate, up = input.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class MLAPlanMetadata:
    """Only rows of compressed indices."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        _indices(*tensors)
        self.tensors = tensors

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._buffers = tuple(buffer for buffer in buffers if buffer is not None)
        assert len(self._buffers) == 4 * use_cuda_graph
        self._planned: tuple[torch.Tensor, ...] = ()

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        self._heads, self._widths, self._page_size = num_heads, (head_dim_ckv, head_dim_kpe), page_size
        self._scale, self._type = sm_scale, q_data_type
        for buffer, tensor in zip(self._buffers, metadata.tensors, strict=False):
            buffer[: len(tensor)].copy_(tensor)
        self._planned = self._buffers or metadata.tensors

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        return self._attend_all(query, kv_cache)

    @kernel
    def _attend_all(self, query: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        assert self._planned, "run without a plan"
        rows, page_rows, pages, lengths = self._planned
        assert query.shape == (int(rows[-1]), self._heads, sum(self._widths))
        assert pool.shape[1:] == (self._page_size, sum(self._widths))
        assert query.dtype == pool.dtype == self._type
        out = query.new_empty(len(query), self._heads, self._widths[0])
        for row, length in enumerate(lengths.tolist()):
            mine = pages[slice(*page_rows[row : row + 2].tolist())].long()
            entries = pool[mine].flatten(0, 1)[:length, None]
            start, stop = rows[row : row + 2].tolist()
            out[start:stop] = _attend(query[start:stop], entries, entries[..., : self._widths[0]], self._scale)
        return out


mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper, MLAPlanMetadata=MLAPlanMetadata)


def softmax(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    assert logits.dtype == torch.float32
    assert temperature is not None
    assert temperature.shape == logits.shape[:1]
    return (logits / temperature[:, None]).softmax(-1)


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor, is_deterministic: bool = False) -> torch.Tensor:
    assert is_deterministic
    assert top_k.dtype == torch.int32
    least = probs.sort(-1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
    kept = probs.where(probs >= least, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool = False) -> torch.Tensor:
    assert is_deterministic
    assert top_p.dtype == torch.float32
    ordered = probs.sort(-1, descending=True).values
    # The likeliest tokens whose mass reaches top_p, the one that makes it reach included.
    count = (ordered.cumsum(-1) < top_p[:, None]).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    kept = probs.where(probs >= ordered.gather(1, count), 0.0)
    return kept / kept.sum(-1, keepdim=True)
