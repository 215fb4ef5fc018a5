"""Attention on a GPU through FlashInfer (Ye et al., 2025), over pages as they lie in the cache.

A batch of decodes goes through the decode wrapper, any other through the prefill wrapper, in which a decode is a chunk
of one token. Latent caches have one wrapper for both, which attends absorbed. All are told to use FlashInfer's kernels
"fa2": they take any number of query heads a KV head, and CUDA graphs can hold them.

FlashInfer computes in float16 and bfloat16 only. What of this has run on hardware: docs/gpu.md.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch

from ..batch import ForwardBatch
from ..cache import KvCache, LatentCache, PagedCache
from ..layers.latent import LatentHeads
from .base import AttentionBackend, AttentionStep, LatentAttentionStep
from .paged_plan import PagedPlan, plan_pages

# What FlashInfer asks for: partial results of sequences that several blocks share.
WORKSPACE_BYTES = 128 << 20
KERNEL = "fa2"

Cache = TypeVar("Cache", bound=PagedCache)
# What a wrapper is planned for besides a batch: the query heads, or the latent ones.
Heads = TypeVar("Heads")


@dataclass(frozen=True, slots=True)
class DevicePages:
    """The tensors of a `PagedPlan` on the device, where kernels read them on every layer."""

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_lens: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, plan: PagedPlan, device: torch.device) -> DevicePages:
        return cls(*(getattr(plan, field.name).to(device) for field in fields(cls)))

    @classmethod
    def for_decodes(cls, size: int, room: int, device: torch.device) -> DevicePages:
        """For `size` decodes that have up to `room` pages together, to be written to by `put`."""

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            query_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
            page_indptr=zeros(size + 1),
            page_indices=zeros(room),
            last_page_lens=zeros(size),
            context_lens=zeros(size),
            rows=torch.arange(size, dtype=torch.int32, device=device),
            positions=zeros(size),
            slots=torch.zeros(size, dtype=torch.int64, device=device),
        )

    def put(self, plan: PagedPlan) -> None:
        """Writes a plan of as many decodes."""
        self.page_indices[: len(plan.page_indices)].copy_(plan.page_indices)
        for name in ("page_indptr", "last_page_lens", "context_lens", "positions", "slots"):
            getattr(self, name).copy_(getattr(plan, name))


class _Step(Generic[Cache, Heads]):
    """A wrapper, planned anew for each pass that it is used in: by `load`, and where that can't know the heads yet, at
    the first layer."""

    def __init__(self, kernels: Any, cache: Cache, pages: DevicePages, wrapper: Any) -> None:
        self._kernels = kernels
        self._cache = cache
        self._pages = pages
        self._wrapper = wrapper
        self._heads: Heads | None = None
        self._waiting: PagedPlan | None = None

    def load(self, plan: PagedPlan) -> None:
        """`plan` is the one that the step's pages are of."""
        if self._heads is None:
            self._waiting = plan
        else:
            self._prepare(plan, self._heads)

    def reload(self, plan: PagedPlan) -> None:
        """Another plan, of as many decodes: for steps whose pages are `DevicePages.for_decodes`."""
        self._pages.put(plan)
        self.load(plan)

    def _know(self, heads: Heads) -> None:
        if self._waiting is not None:
            self._heads = heads
            self._prepare(self._waiting, heads)
            self._waiting = None

    @abstractmethod
    def _prepare(self, plan: PagedPlan, heads: Heads) -> None: ...


class FlashInferStep(_Step[KvCache, int], AttentionStep):
    """See `AttentionStep`."""

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        self._know(queries.shape[1])
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

    def _prepare(self, plan: PagedPlan, heads: int) -> None:
        cache = self._cache
        sizes = (heads, cache.kv_heads, cache.head_dim, cache.page_size)
        where = (plan.page_indptr, plan.page_indices, plan.last_page_lens)
        if plan.decode:
            self._wrapper.plan(*where, *sizes, q_data_type=cache.dtype, kv_data_type=cache.dtype)
        else:
            self._wrapper.plan(
                plan.query_indptr, *where, *sizes, causal=True, q_data_type=cache.dtype, kv_data_type=cache.dtype
            )


class FlashInferLatentStep(_Step[LatentCache, LatentHeads], LatentAttentionStep):
    """See `LatentAttentionStep`. Chunks attend absorbed too: FlashInfer reads latent pages in no other way."""

    def __call__(self, layer: int, queries: torch.Tensor, entries: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        self._know(heads)
        pool = self._cache.tensor[layer]
        pool.view(-1, pool.shape[-1]).index_copy_(0, self._pages.slots, entries)
        attended: torch.Tensor = self._wrapper.run(query=heads.absorb(queries), kv_cache=pool)
        return heads.values(attended)

    def _prepare(self, plan: PagedPlan, heads: LatentHeads) -> None:
        cache = self._cache
        self._wrapper.plan(
            metadata=self._kernels.mla.MLAPlanMetadata.csr(
                plan.query_indptr, plan.page_indptr, plan.page_indices, plan.context_lens
            ),
            num_heads=heads.key_up.shape[0],
            head_dim_ckv=heads.latent,
            head_dim_kpe=cache.head_dim - heads.latent,
            page_size=cache.page_size,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )


@dataclass(frozen=True, slots=True)
class DecodeSlots(ForwardBatch):
    """A batch of decodes whose tensors stay where they are, and which `step` attends for, whatever they hold."""

    step: FlashInferStep | FlashInferLatentStep

    def token_range(self) -> None:
        """Not looked at: they change."""


class FlashInferAttention(AttentionBackend):
    """`kernels`: the module flashinfer; `device`: of the caches and of all tensors of a batch."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self.device = device
        self._kernels = kernels
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Each allocates a workspace of integers, and page-locked memory to fill it from: not for every pass anew.
        self._wrappers: dict[tuple[str, bool], Any] = {}

    def plan(self, batch: ForwardBatch, cache: KvCache) -> AttentionStep:
        """See `AttentionBackend.plan`. Pages that the batch begins are cleared at once."""
        if isinstance(batch, DecodeSlots):
            assert isinstance(batch.step, FlashInferStep)
            return batch.step
        plan = self.plan_pages(batch, cache)
        step = FlashInferStep(
            self._kernels, cache, DevicePages.of(plan, self.device), self._wrapper(cache.order, plan.decode)
        )
        step.load(plan)
        return step

    def plan_latent(self, batch: ForwardBatch, cache: LatentCache) -> LatentAttentionStep:
        """See `AttentionBackend.plan_latent`."""
        if isinstance(batch, DecodeSlots):
            assert isinstance(batch.step, FlashInferLatentStep)
            return batch.step
        plan = self.plan_pages(batch, cache)
        step = FlashInferLatentStep(
            self._kernels, cache, DevicePages.of(plan, self.device), self._wrapper(cache.order, False)
        )
        step.load(plan)
        return step

    def plan_pages(self, batch: ForwardBatch, cache: PagedCache) -> PagedPlan:
        """Also clears, in all layers, the pages that the batch begins. Raises `InvalidBatch` before."""
        plan = plan_pages(batch, cache.page_size, cache.pages)
        if plan.begun:
            cache.tensor.index_fill_(1, torch.tensor(plan.begun, device=self.device), 0)
        return plan

    def decode_step(self, cache: PagedCache, size: int, room: int) -> FlashInferStep | FlashInferLatentStep:
        """A step that graphs can capture, for `size` decodes that have up to `room` pages together."""
        pages = DevicePages.for_decodes(size, room, self.device)
        if isinstance(cache, LatentCache):
            latent = self._kernels.mla.BatchMLAPagedAttentionWrapper(
                self._workspace,
                use_cuda_graph=True,
                qo_indptr=pages.query_indptr,
                kv_indptr=pages.page_indptr,
                kv_indices=pages.page_indices,
                kv_len_arr=pages.context_lens,
                backend=KERNEL,
            )
            return FlashInferLatentStep(self._kernels, cache, pages, latent)
        assert isinstance(cache, KvCache)
        wrapper = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout=cache.order,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=pages.page_indptr,
            paged_kv_indices_buffer=pages.page_indices,
            paged_kv_last_page_len_buffer=pages.last_page_lens,
            backend=KERNEL,
        )
        return FlashInferStep(self._kernels, cache, pages, wrapper)

    def _wrapper(self, order: str, decode: bool) -> Any:
        if (order, decode) not in self._wrappers:
            self._wrappers[order, decode] = self._make(order, decode)
        return self._wrappers[order, decode]

    def _make(self, order: str, decode: bool) -> Any:
        kernels = self._kernels
        if order == "MLA":
            return kernels.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend=KERNEL)
        if decode:
            return kernels.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, kv_layout=order, use_tensor_cores=True, backend=KERNEL
            )
        return kernels.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout=order, backend=KERNEL)
