"""Attention on a GPU through FlashInfer (Ye et al., 2025), over pages as they lie in the cache.

A batch of decodes goes through the decode wrapper, any other through the prefill wrapper, in which a decode is a chunk
of one token. Both are told to use FlashInfer's tensor-core kernel "fa2": one kernel to compile for both, which takes
any number of query heads a KV head, and which CUDA graphs can hold.

FlashInfer computes in float16 and bfloat16 only. What of this has run on hardware: docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import ForwardBatch
from ..cache import KvCache
from .base import AttentionBackend, AttentionStep
from .paged_plan import PagedPlan, plan_pages

# What FlashInfer asks for: partial results of sequences that several blocks share.
WORKSPACE_BYTES = 128 << 20
KERNEL = "fa2"


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Of a `PagedPlan`, what kernels read on every layer; int32 on the device."""

    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_lens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, plan: PagedPlan, device: torch.device) -> DevicePages:
        return cls(
            plan.page_indptr.to(device),
            plan.page_indices.to(device),
            plan.last_page_lens.to(device),
            plan.rows.to(device),
            plan.positions.to(device),
        )


class FlashInferStep(AttentionStep):
    """See `AttentionStep`. To be loaded with the plan that `pages` are of, anew for each pass that it is used in."""

    def __init__(self, kernels: Any, cache: KvCache, pages: DevicePages, wrapper: Any) -> None:
        self._kernels = kernels
        self._cache = cache
        self._pages = pages
        self._wrapper = wrapper
        # The first call is the first to know it.
        self._heads: int | None = None
        self._waiting: PagedPlan | None = None

    def load(self, plan: PagedPlan) -> None:
        if self._heads is None:
            self._waiting = plan
        else:
            plan_wrapper(self._wrapper, plan, self._cache, self._heads)

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        if self._waiting is not None:
            self._heads = queries.shape[1]
            plan_wrapper(self._wrapper, self._waiting, self._cache, self._heads)
            self._waiting = None
        pages, pool = self._pages, self._cache.tensor[layer]
        self._kernels.append_paged_kv_cache(
            entries[:, 0],
            entries[:, 1],
            pages.rows,
            pages.positions,
            pool,
            pages.page_indices,
            pages.page_indptr,
            pages.last_page_lens,
            kv_layout=self._cache.order,
        )
        attended: torch.Tensor = self._wrapper.run(queries, pool)
        return attended.flatten(1)


def plan_wrapper(wrapper: Any, plan: PagedPlan, cache: KvCache, heads: int) -> None:
    """Has a decode or prefill wrapper, as the plan is one, prepare for a batch."""
    sizes = (heads, cache.kv_heads, cache.head_dim, cache.page_size)
    where = (plan.page_indptr, plan.page_indices, plan.last_page_lens)
    if plan.decode:
        wrapper.plan(*where, *sizes, q_data_type=cache.dtype, kv_data_type=cache.dtype)
    else:
        wrapper.plan(plan.query_indptr, *where, *sizes, causal=True, q_data_type=cache.dtype, kv_data_type=cache.dtype)


def clear_begun(cache: KvCache, plan: PagedPlan) -> None:
    """Clears, in all layers, the pages that a batch begins."""
    if plan.begun:
        cache.tensor.index_fill_(1, torch.tensor(plan.begun, device=cache.tensor.device), 0)


@dataclass(frozen=True, slots=True)
class DecodeSlots(ForwardBatch):
    """A batch of decodes whose tensors stay where they are, and which `step` attends for, whatever they hold."""

    step: AttentionStep

    def token_range(self) -> None:
        """Not looked at: they change."""


class FlashInferAttention(AttentionBackend):
    """`kernels`: the module flashinfer; `device`: of the caches and of all tensors of a batch."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[bool, str], Any] = {}

    def plan(self, batch: ForwardBatch, cache: KvCache) -> AttentionStep:
        """See `AttentionBackend.plan`. Pages that the batch begins are cleared at once."""
        if isinstance(batch, DecodeSlots):
            return batch.step
        plan = plan_pages(batch, cache.page_size, cache.pages)
        clear_begun(cache, plan)
        make = self._decode if plan.decode else self._prefill
        wrapper = self._wrapper((plan.decode, cache.order), lambda: make(cache.order))
        step = FlashInferStep(self.kernels, cache, DevicePages.of(plan, self.device), wrapper)
        step.load(plan)
        return step

    def slots(self, cache: KvCache, pages: DevicePages) -> FlashInferStep:
        """A step for decodes that a graph captures: it reads `pages`, and `load` writes the page numbers there."""
        wrapper = self.kernels.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            kv_layout=cache.order,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=pages.page_indptr,
            paged_kv_indices_buffer=pages.page_indices,
            paged_kv_last_page_len_buffer=pages.last_page_lens,
            backend=KERNEL,
        )
        return FlashInferStep(self.kernels, cache, pages, wrapper)

    def _wrapper(self, key: tuple[bool, str], make: Callable[[], Any]) -> Any:
        # Each allocates a workspace of integers, and page-locked memory to fill it from: not for every pass anew.
        if key not in self._wrappers:
            self._wrappers[key] = make()
        return self._wrappers[key]

    def _decode(self, order: str) -> Any:
        return self.kernels.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, kv_layout=order, use_tensor_cores=True, backend=KERNEL
        )

    def _prefill(self, order: str) -> Any:
        return self.kernels.BatchPrefillWithPagedKVCacheWrapper(self.workspace, kv_layout=order, backend=KERNEL)
