"""Mixtures of experts: tokens grouped by expert and experts split over ranks change nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.layers.moe import MixtureOfExperts, SeparateExperts, SoftmaxRouter, StackedExperts
from baton_model.parallel import RankGroup
from baton_model.platform import cpu_platform
from baton_model.weights import WeightReader
from memory_weights import AbsentRank, MemoryWeights

HIDDEN, INNER = 12, 20


def weights(count: int) -> MemoryWeights:
    random = torch.Generator().manual_seed(count)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return MemoryWeights(
        {
            f"experts.{expert}.{part}.weight": torch.randn(shape, generator=random).numpy()
            for expert in range(count)
            for part, shape in shapes.items()
        }
    )


KINDS = [SeparateExperts, StackedExperts]


def experts(kind: type, source: MemoryWeights, count: int, group: RankGroup) -> SeparateExperts | StackedExperts:
    reader = WeightReader(source, torch.float32, cpu_platform(), group=group)
    return kind("experts", count, HIDDEN, INNER, reader)


def token_by_token(source: MemoryWeights, x, factors, chosen) -> torch.Tensor:
    rows = []
    for token, token_factors, token_experts in zip(x, factors, chosen, strict=True):
        total = torch.zeros(HIDDEN)
        for factor, expert in zip(token_factors, token_experts.tolist(), strict=True):
            gate, up, down = (source.read(f"experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
            total += factor * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(total)
    return torch.stack(rows)


@given(
    tokens=st.integers(1, 30), count=st.integers(1, 9), ranks=st.integers(1, 4), seed=st.integers(0, 99), data=st.data()
)
@settings(max_examples=60)
def test_the_ranks_parts_sum_to_each_token_through_its_experts(tokens, count, ranks, seed, data):
    active = data.draw(st.integers(1, count))
    random = torch.Generator().manual_seed(seed)
    source, x = weights(count), torch.randn(tokens, HIDDEN, generator=random)
    chosen = torch.rand(tokens, count, generator=random).topk(active).indices
    factors = torch.rand(tokens, active, generator=random)
    expected = token_by_token(source, x, factors, chosen)
    for kind in KINDS:
        parts = [experts(kind, source, count, AbsentRank(rank, ranks))(x, factors, chosen) for rank in range(ranks)]
        torch.testing.assert_close(sum(parts), expected, atol=1e-4, rtol=1e-4)


def test_what_other_ranks_compute_leaves_nothing_behind():
    """Not even where the rows that a grouped product leaves out hold what is no number."""
    held = experts(StackedExperts, weights(4), 4, AbsentRank(1, 2))
    held.activate = lambda rows: cpu_platform().operators.silu_and_mul(rows.masked_fill_(spoiled[:, None], torch.nan))
    chosen = torch.tensor([[0, 2], [1, 0], [3, 1]])
    spoiled = torch.tensor([False, False, True, True, True, True])
    result = held(torch.randn(3, HIDDEN), torch.ones(3, 2), chosen)
    assert result.isfinite().all()
    assert (result.count_nonzero(1) > 0).tolist() == [True, False, True]


def test_what_every_token_goes_through_is_added():
    source, x = weights(3), torch.randn(5, HIDDEN)
    router = SoftmaxRouter(torch.randn(3, HIDDEN), 2, normalised=True)
    routed = experts(SeparateExperts, source, 3, AbsentRank(0, 1))
    shared = MixtureOfExperts(router, routed, shared=lambda x: 10 * x)
    torch.testing.assert_close(shared(x), MixtureOfExperts(router, routed)(x) + 10 * x)


def test_the_router_takes_the_most_likely_and_scales_them_if_told():
    weight = torch.eye(4)
    x = torch.tensor([[3.0, 0.0, 1.0, 2.0], [0.0, 5.0, 4.0, 0.0]])
    likely = x.softmax(-1)
    factors, chosen = SoftmaxRouter(weight, 2, normalised=False)(x)
    assert chosen.tolist() == [[0, 3], [1, 2]]
    torch.testing.assert_close(factors, likely.gather(1, chosen))
    scaled, again = SoftmaxRouter(weight, 2, normalised=True)(x)
    assert torch.equal(again, chosen)
    torch.testing.assert_close(scaled, factors / factors.sum(-1, keepdim=True))
