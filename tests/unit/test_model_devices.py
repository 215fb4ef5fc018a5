"""Every family keeps to the device that it was loaded on: passes over tensors of the device "meta", without memory.

It refuses what waits for a value, as a graph does; `OneDevice` refuses what mixes devices, as a GPU does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton_model.attention.flashinfer import FlashInferAttention
from baton_model.batch import ForwardBatch
from baton_model.cache import open_cache
from baton_model.decode_graphs import DecodeGraphs
from baton_model.loaders import load_model
from baton_model.platform import flashinfer_platform
from small_deepseek import SmallDeepseek
from small_models import SmallModel

ELSEWHERE = torch.device("meta")


class Wrapper:
    """Attention of any kind: results of the right shape."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._width = 0

    def plan(self, *_: Any, head_dim_ckv: int = 0, **__: Any) -> None:
        self._width = head_dim_ckv

    def run(self, q: torch.Tensor | None = None, pool: Any = None, query: Any = None, kv_cache: Any = None) -> Any:
        asked = query if q is None else q
        cache = kv_cache if q is None else pool
        assert asked.device == cache.device == ELSEWHERE
        return asked.new_empty(*asked.shape[:2], self._width or asked.shape[2])


def elsewhere(*tensors: torch.Tensor) -> None:
    assert all(tensor.device == ELSEWHERE for tensor in tensors), [tensor.device for tensor in tensors]


def append(key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor, kv_layout: str) -> None:
    elsewhere(key, value, *others)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    elsewhere(x, weight)
    return torch.empty_like(x)


KERNELS = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Wrapper,
    BatchPrefillWithPagedKVCacheWrapper=Wrapper,
    mla=SimpleNamespace(
        BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=SimpleNamespace(csr=lambda *tensors: tensors)
    ),
    append_paged_kv_cache=append,
    rmsnorm=rmsnorm,
    silu_and_mul=lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)


class OneDevice(TorchDispatchMode):
    """Numbers may come from the CPU, and so may what is copied; anything else is an error on a GPU."""

    MAY_MIX = frozenset({"aten::copy_", "aten::_to_copy"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.dim()]
        name = func._schema.name
        assert len({each.device for each in tensors}) < 2 or name in self.MAY_MIX, f"{name} mixes devices"
        return func(*args, **(kwargs or {}))


class NoGraph:
    """Nothing is captured; the pass that would be runs all the same."""

    def capture(self) -> Any:
        return torch.inference_mode()

    def replay(self) -> None:
        pass


CHECKPOINTS = {
    **{family: SmallModel(family=family) for family in ("llama", "qwen2", "qwen3", "qwen3_moe")},
    **{f"deepseek_v{generation}": SmallDeepseek(generation=generation) for generation in (2, 3)},
}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_pass_stays_on_the_device(tmp_path, family):
    path = CHECKPOINTS[family].write_hugging_face(tmp_path)
    with OneDevice():
        model = load_model(path, "bfloat16", flashinfer_platform(KERNELS, ELSEWHERE, (torch.bfloat16,)))
        shape = model.cache_shape
        elements = shape.layers * 4 * 8 * shape.head_dim * shape.kv_heads * (1 if shape.latent else 2)
        buffer = torch.empty(elements * 2, dtype=torch.uint8, device=ELSEWHERE)
        cache = open_cache(buffer, shape, order="HND", pages=4, page_size=8, dtype=model.dtype)
        batch = ForwardBatch.build([([1, 2, 3], 0), ([4], 9)], [[0], [1, 2]], ELSEWHERE)
        logits = model.logits(model.forward(batch, cache))
        assert (logits.device, logits.dtype, len(logits)) == (ELSEWHERE, torch.float32, 4)
        assert isinstance(model.backend, FlashInferAttention)
        graphs = DecodeGraphs(model, model.backend, cache, [1, 2], NoGraph, lambda layer: None)
        hidden = graphs.run(ForwardBatch.build([([4], 9)], [[1, 2]]))
        assert (hidden.device, len(hidden)) == (ELSEWHERE, 1)


def test_what_is_left_on_the_cpu_is_noticed():
    with OneDevice(), pytest.raises(AssertionError, match="mixes devices"):
        torch.empty(3, 4, device=ELSEWHERE) @ torch.empty(4, 2)
