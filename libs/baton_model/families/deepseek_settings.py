"""The settings of DeepSeek-V2 and V3 as the two kinds of checkpoints spell them."""

from __future__ import annotations

from dataclasses import replace

from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..gguf_file import GgufFile
from ..settings import Settings
from . import decoder_settings


def from_hugging_face(settings: Settings) -> ModelConfig:
    """From config.json; absent settings have transformers' defaults. Raises `InvalidConfig`."""
    if "DeepseekV2ForCausalLM" in settings.strings("architectures"):
        return _v2(settings)
    return _v3(settings)


def from_gguf(file: GgufFile) -> ModelConfig:
    """From a file's metadata. llama.cpp has one architecture for both generations. Raises `InvalidConfig`."""
    settings = Settings(file.metadata, file.path, prefix=f"{file.architecture}.")
    if settings.get("nextn_predict_layers", int, 0):
        raise settings.invalid("nextn_predict_layers", "modules for multi-token prediction can't be read from GGUF")
    rope = settings.positive("rope.dimension_count", most=decoder_settings.MOST_HEAD_DIM)
    gating = settings.get("expert_gating_func", int, 1)
    if gating not in (1, 2):
        raise settings.invalid("expert_gating_func", "it must be 1 (softmax) or 2 (sigmoid)")
    config = decoder_settings.from_gguf(file, family="deepseek_v2" if gating == 1 else "deepseek_v3", rotated=rope)
    if settings.get("rope.scaling.attn_factor", float, 1.0) != 1.0:
        raise settings.invalid("rope.scaling.attn_factor", "with latent attention it must be 1")
    # llama.cpp turns without a temperature, and writes a tenth of mscale_all_dim for that of the scores.
    temperature = 10 * settings.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    # Files from before llama.cpp absorbed projections have the lengths of the heads under the plain names.
    suffix = "_mla" if "attention.key_length_mla" in settings else ""
    latent = LatentConfig(
        rank=settings.positive("attention.kv_lora_rank"),
        rope=rope,
        nope=settings.positive(f"attention.key_length{suffix}") - rope,
        value=settings.positive(f"attention.value_length{suffix}"),
        query_rank=settings.positive("attention.q_lora_rank") if "attention.q_lora_rank" in settings else None,
        interleaved_rotary=True,
    )
    if latent.nope < 1:
        raise settings.invalid(f"attention.key_length{suffix}", f"it must be more than the {rope} that are rotated")
    return replace(
        config,
        kv_heads=1,
        head_dim=latent.rank + latent.rope,
        latent=latent,
        rope=replace(config.rope, attention_factor=1.0, mscale_all_dim=temperature),
        experts=_experts_from_gguf(settings, config, sigmoid=gating == 2) if "expert_count" in settings else None,
    )


def _experts_from_gguf(settings: Settings, config: ModelConfig, sigmoid: bool) -> ExpertsConfig:
    inner = settings.positive("expert_feed_forward_length")
    scaling, normalised = (
        settings.get("expert_weights_scale", float, 1.0),
        settings.get("expert_weights_norm", bool, False),
    )
    experts = ExpertsConfig(
        count=settings.positive("expert_count"),
        active=settings.positive("expert_used_count"),
        intermediate_size=inner,
        normalised=normalised,
        layers=frozenset(range(settings.integer("leading_dense_block_count", 0, least=0), config.layers)),
        shared_size=inner * settings.integer("expert_shared_count", 0, least=0),
        scaling=scaling,
        scoring="sigmoid" if sigmoid else "softmax",
    )
    groups, active = _groups(settings, experts, "expert_group_count", "expert_group_used_count", (1, 1))
    experts = replace(experts, groups=groups, active_groups=active)
    return experts if sigmoid else _normalised_or_scaled(experts)


def _v2(settings: Settings) -> ModelConfig:
    method = settings.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise settings.invalid("topk_method", "it must be 'greedy' or 'group_limited_greedy'")
    _require(settings, "scoring_func", "softmax")
    config = _common(settings, "deepseek_v2", context_length=2048, interleaved=True)
    experts = _experts(settings, config, count=64, active=6, size=1407, shared=2, dense=0)
    if experts is None:
        return config
    groups, active_groups = 1, 1
    if method == "group_limited_greedy":
        groups, active_groups = _groups(settings, experts, "n_group", "topk_group", (1, 1))
    experts = replace(
        experts,
        normalised=settings.get("norm_topk_prob", bool, False),
        scaling=settings.get("routed_scaling_factor", float, 1.0),
        groups=groups,
        active_groups=active_groups,
    )
    return replace(config, experts=_normalised_or_scaled(experts))


def _normalised_or_scaled(experts: ExpertsConfig) -> ExpertsConfig:
    """Factors of DeepSeek-V2 are normalised or scaled, not both, and a single one is never normalised: as in the code
    that was published with the weights."""
    normalised = experts.normalised and experts.active > 1
    return replace(experts, normalised=normalised, scaling=1.0 if normalised else experts.scaling)


def _v3(settings: Settings) -> ModelConfig:
    _require(settings, "topk_method", "noaux_tc")
    _require(settings, "scoring_func", "sigmoid")
    interleaved = settings.get("rope_interleave", bool, True)
    config = _common(settings, "deepseek_v3", context_length=4096, interleaved=interleaved)
    config = replace(
        config, mtp_layers=settings.integer("num_nextn_predict_layers", 0, least=0, most=decoder_settings.MOST_LAYERS)
    )
    experts = _experts(settings, config, count=256, active=8, size=2048, shared=1, dense=3)
    if experts is None:
        return config
    experts = replace(experts, scoring="sigmoid")
    groups, active_groups = _groups(settings, experts, "n_group", "topk_group", (8, 4))
    return replace(
        config,
        experts=replace(
            experts,
            normalised=settings.get("norm_topk_prob", bool, True),
            scaling=settings.get("routed_scaling_factor", float, 2.5),
            groups=groups,
            active_groups=active_groups,
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
        rope=settings.positive("qk_rope_head_dim", 64, most=decoder_settings.MOST_HEAD_DIM),
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
    first = settings.integer("first_k_dense_replace", dense, least=0)
    step, inner = settings.positive("moe_layer_freq", 1), settings.positive("moe_intermediate_size", size)
    experts = ExpertsConfig(
        count=routed,
        active=settings.positive("num_experts_per_tok", active),
        intermediate_size=inner,
        normalised=False,
        layers=frozenset(layer for layer in range(first, config.layers + config.mtp_layers) if layer % step == 0),
        shared_size=inner * (settings.optional("n_shared_experts", shared, least=0) or 0),
    )
    if config.mlp_bias and not experts.shared_size:
        raise settings.invalid("n_shared_experts", "where blocks have biases (mlp_bias) it must be at least 1")
    if experts.active > experts.count:
        raise settings.invalid("num_experts_per_tok", f"there are {experts.count} experts")
    return experts


def _groups(
    settings: Settings, experts: ExpertsConfig, count: str, opened: str, defaults: tuple[int, int]
) -> tuple[int, int]:
    """Groups and how many of them are open to a token, from the settings of these names."""
    groups = settings.positive(count, defaults[0])
    if experts.count % groups:
        raise settings.invalid(count, f"{experts.count} experts can't be divided into so many equal groups")
    if experts.scoring == "sigmoid" and experts.count < 2 * groups:
        raise settings.invalid(count, "a group must have two experts at least: their sum is what it counts")
    active = settings.positive(opened, defaults[1])
    if not experts.active <= active * (experts.count // groups) <= experts.count:
        raise settings.invalid(
            opened, f"{groups} groups of {experts.count // groups} experts must hold {experts.active} open ones"
        )
    return groups, active
