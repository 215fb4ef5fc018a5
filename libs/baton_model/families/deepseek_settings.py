"""The settings of DeepSeek-V2 and V3 as config.json spells them; absent ones have transformers' defaults."""

from __future__ import annotations

from dataclasses import replace

from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..settings import Settings
from . import decoder_settings


def v2_from_hugging_face(settings: Settings) -> ModelConfig:
    """DeepSeek-V2, V2-Lite, V2.5. Raises `InvalidConfig`."""
    method = settings.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise settings.invalid("topk_method", "it must be 'greedy' or 'group_limited_greedy'")
    _require(settings, "scoring_func", "softmax")
    config = _common(settings, "deepseek_v2", context_length=2048, interleaved=True)
    experts = _experts(settings, config, count=64, active=6, size=1407, shared=2, dense=0)
    if experts is None:
        return config
    # As in the model that was published with the weights: factors are normalised or scaled, not both.
    normalised = settings.get("norm_topk_prob", bool, False) and experts.active > 1
    groups = _groups(settings, experts, 1, 1) if method == "group_limited_greedy" else (1, 1)
    return replace(
        config,
        experts=replace(
            experts,
            normalised=normalised,
            scaling=1.0 if normalised else settings.get("routed_scaling_factor", float, 1.0),
            groups=groups[0],
            active_groups=groups[1],
        ),
    )


def v3_from_hugging_face(settings: Settings) -> ModelConfig:
    """DeepSeek-V3, V3.1, R1. Raises `InvalidConfig`."""
    _require(settings, "topk_method", "noaux_tc")
    _require(settings, "scoring_func", "sigmoid")
    interleaved = settings.get("rope_interleave", bool, True)
    config = _common(settings, "deepseek_v3", context_length=4096, interleaved=interleaved)
    config = replace(config, mtp_layers=settings.get("num_nextn_predict_layers", int, 0))
    experts = _experts(settings, config, count=256, active=8, size=2048, shared=1, dense=3)
    if experts is None:
        return config
    groups, active_groups = _groups(settings, experts, 8, 4)
    if experts.count < 2 * groups:
        raise settings.invalid("n_group", "a group must have two experts at least: their sum is what it counts")
    return replace(
        config,
        experts=replace(
            experts,
            normalised=settings.get("norm_topk_prob", bool, True),
            scaling=settings.get("routed_scaling_factor", float, 2.5),
            groups=groups,
            active_groups=active_groups,
            scoring="sigmoid",
        ),
    )


def _require(settings: Settings, key: str, value: str) -> None:
    if settings.get(key, str, value) != value:
        raise settings.invalid(key, f"for this architecture it must be {value!r}")


def _common(settings: Settings, family: str, context_length: int, interleaved: bool) -> ModelConfig:
    bias = settings.get("attention_bias", bool, False)
    config = decoder_settings.from_hugging_face(
        settings,
        family=family,
        context_length=context_length,
        head_dim=2,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=settings.get("mlp_bias", bool, False),
    )
    latent = LatentConfig(
        rank=settings.positive("kv_lora_rank", 512),
        rope=settings.positive("qk_rope_head_dim", 64),
        nope=settings.positive("qk_nope_head_dim", 128),
        value=settings.positive("v_head_dim", 128),
        query_rank=settings.optional("q_lora_rank", 1536),
        interleaved_rotary=interleaved,
    )
    if latent.rope % 2:
        raise settings.invalid("qk_rope_head_dim", "it must be even")
    return replace(config, kv_heads=1, head_dim=latent.rank + latent.rope, latent=latent)


def _experts(
    settings: Settings, config: ModelConfig, count: int, active: int, size: int, shared: int, dense: int
) -> ExpertsConfig | None:
    """What both generations have, with the defaults given; None for a model without experts."""
    routed = settings.optional("n_routed_experts", count)
    if routed is None:
        return None
    first = settings.get("first_k_dense_replace", int, dense)
    step, inner = settings.positive("moe_layer_freq", 1), settings.positive("moe_intermediate_size", size)
    experts = ExpertsConfig(
        count=routed,
        active=settings.positive("num_experts_per_tok", active),
        intermediate_size=inner,
        normalised=False,
        layers=frozenset(layer for layer in range(first, config.layers + config.mtp_layers) if layer % step == 0),
        shared_size=inner * (settings.optional("n_shared_experts", shared) or 0),
    )
    if experts.active > experts.count:
        raise settings.invalid("num_experts_per_tok", f"there are {experts.count} experts")
    return experts


def _groups(settings: Settings, experts: ExpertsConfig, groups: int, active: int) -> tuple[int, int]:
    """Groups and how many of them are open to a token."""
    groups = settings.positive("n_group", groups)
    if experts.count % groups:
        raise settings.invalid("n_group", f"{experts.count} experts can't be divided into so many equal groups")
    active = settings.positive("topk_group", active)
    if not experts.active <= active * (experts.count // groups) <= experts.count:
        raise settings.invalid(
            "topk_group", f"{groups} groups of {experts.count // groups} experts must hold {experts.active} open ones"
        )
    return groups, active
