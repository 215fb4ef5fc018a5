"""How DeepSeek's models choose experts, against the definitions written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_model.config import ExpertsConfig
from baton_model.errors import InvalidConfig
from baton_model.layers.grouped_routers import BiasedRouter, GroupLimitedRouter
from baton_model.loaders import load_config
from small_deepseek import SmallDeepseek

HIDDEN = 5


@st.composite
def configs(draw):
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    opened = draw(st.integers(1, groups))
    return ExpertsConfig(
        count=groups * size,
        active=draw(st.integers(1, opened * size)),
        intermediate_size=1,
        normalised=draw(st.booleans()),
        layers=frozenset(),
        groups=groups,
        active_groups=opened,
        scaling=draw(st.sampled_from([1.0, 2.5])),
    )


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda i: -scores[i])[:count])


def expected(scores: list[float], choice: list[float], config: ExpertsConfig, pair: int) -> dict[int, float]:
    """Factor by expert: those with the best `choice` among the groups whose `pair` best of it sum highest."""
    size = config.count // config.groups
    members = {group: range(group * size, (group + 1) * size) for group in range(config.groups)}
    worth = {group: sum(sorted((choice[i] for i in each), reverse=True)[:pair]) for group, each in members.items()}
    opened = {i: choice[i] for group in best(worth, config.active_groups) for i in members[group]}
    chosen = best(opened, config.active)
    total = sum(scores[i] for i in chosen) if config.normalised else 1.0
    return {i: scores[i] / total * config.scaling for i in chosen}


def check(router, x: torch.Tensor, wanted: list[dict[int, float]]) -> None:
    factors, experts = router(x)
    assert factors.dtype == x.dtype and experts.dtype == torch.int64
    for row_factors, row_experts, each in zip(factors.tolist(), experts.tolist(), wanted, strict=True):
        found = dict(zip(row_experts, row_factors, strict=True))
        assert found.keys() == each.keys()
        assert all(math.isclose(found[i], each[i], rel_tol=1e-4) for i in each)


@settings(max_examples=60)
@given(configs(), st.integers(0, 2**31))
def test_softmax_within_the_groups_of_the_best_experts(config, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(config.count, HIDDEN, generator=generator)
    x = torch.randn(6, HIDDEN, generator=generator)
    scores = (x @ weight.T).softmax(-1).tolist()
    check(GroupLimitedRouter(weight, config), x, [expected(each, each, config, 1) for each in scores])


@settings(max_examples=60)
@given(configs(), st.integers(0, 2**31))
def test_sigmoids_with_a_bias_that_only_the_choice_sees(config, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (
        torch.randn(config.count, HIDDEN, generator=generator),
        torch.randn(config.count, generator=generator),
    )
    x = torch.randn(6, HIDDEN, generator=generator)
    scores = (x @ weight.T).sigmoid()
    wanted = [
        expected(each, choice, config, 2)
        for each, choice in zip(scores.tolist(), (scores + bias).tolist(), strict=True)
    ]
    check(BiasedRouter(weight, bias, config), x, wanted)


def test_routing_is_in_float32_whatever_the_models_dtype():
    """Two experts that bfloat16 cannot tell apart."""
    config = ExpertsConfig(2, 1, 1, False, frozenset())
    weight = torch.tensor([[1.0, 0.0], [1.0, 1e-4]])
    factors, experts = GroupLimitedRouter(weight, config)(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16))
    assert experts.tolist() == [[1], [0]] and factors.dtype == torch.bfloat16


def test_factors_of_v2_are_normalised_or_scaled_but_not_both(tmp_path):
    def experts(name: str, **settings) -> ExpertsConfig:
        found = load_config(
            SmallDeepseek(generation=2, layers=1).write_hugging_face(tmp_path / name, **settings)
        ).experts
        assert found is not None
        return found

    scaled, normalised = experts("scaled"), experts("normalised", norm_topk_prob=True)
    alone = experts("alone", norm_topk_prob=True, num_experts_per_tok=1)
    assert [(each.normalised, each.scaling) for each in (scaled, normalised, alone)] == [
        (False, 1.5),
        (True, 1.0),
        (False, 1.5),
    ]


@pytest.mark.parametrize(
    ("generation", "setting", "value"),
    [
        (2, "topk_method", "noaux_tc"),
        (2, "scoring_func", "sigmoid"),
        (3, "topk_method", "greedy"),
        (3, "scoring_func", "softmax"),
        (3, "n_group", 3),
        (3, "n_group", 8),
        (3, "topk_group", 3),
        (2, "topk_group", 3),
        (3, "num_experts_per_tok", 9),
        (3, "n_routed_experts", -1),
        (3, "qk_rope_head_dim", 5),
        (3, "hidden_act", "gelu"),
    ],
)
def test_settings_that_the_family_does_not_compute_are_named(tmp_path, generation, setting, value):
    small = SmallDeepseek(generation=generation, layers=1)
    with pytest.raises(InvalidConfig, match=f"'{setting}'"):
        load_config(small.write_hugging_face(tmp_path, **{setting: value}))


def test_layers_with_experts(tmp_path):
    def sparse(name: str, **settings) -> list[int]:
        directory = SmallDeepseek(layers=6, mtp=1).write_hugging_face(tmp_path / name, **settings)
        found = load_config(directory).experts
        return sorted(found.layers) if found else []

    # The module for multi-token prediction counts on.
    assert sparse("usual") == [1, 2, 3, 4, 5, 6]
    assert sparse("every second", first_k_dense_replace=3, moe_layer_freq=2) == [4, 6]
