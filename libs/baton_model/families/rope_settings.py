"""Rotary settings as the two kinds of checkpoints spell them."""

from __future__ import annotations

from typing import cast, get_args

from ..config import RopeConfig, RopeKind
from ..gguf_file import GgufFile
from ..layers.rotary import yarn_mscale
from ..settings import Settings

_DIVISORS = "rope_freqs.weight"


def from_hugging_face(settings: Settings, default_theta: float, context_length: int) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older checkpoints have them.

    Raises `InvalidConfig`."""
    section = settings.section("rope_parameters") or settings.section("rope_scaling")
    theta = settings.get("rope_theta", float, default_theta)
    if section is None:
        return RopeConfig(theta=theta)
    theta = section.get("rope_theta", float, theta)
    kind = _kind(section, "rope_type" if "rope_type" in section else "type")
    if section.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise section.invalid("partial_rotary_factor", "only whole heads are rotated; it must be 1")
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, kind=kind)
    original = section.positive("original_max_position_embeddings", context_length)
    implied = {"default": context_length / original} if kind == "yarn" else {}
    factor = section.get("factor", float, **implied)
    if factor < 1:
        raise section.invalid("factor", "it must be at least 1")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context_length=original,
        low_frequency_factor=section.get("low_freq_factor", float, 1.0),
        high_frequency_factor=section.get("high_freq_factor", float, 4.0),
        beta_fast=section.get("beta_fast", float, 32.0),
        beta_slow=section.get("beta_slow", float, 1.0),
        mscale=section.get("mscale", float, 0.0),
        mscale_all_dim=section.get("mscale_all_dim", float, 0.0),
        attention_factor=section.get("attention_factor", float) if "attention_factor" in section else None,
        truncate=section.get("truncate", bool, True),
    )


def from_gguf(file: GgufFile, settings: Settings, head_dim: int, context_length: int) -> RopeConfig:
    """From the `rope.*` keys of an architecture. Raises `InvalidConfig`."""
    if settings.get("rope.dimension_count", int, head_dim) != head_dim:
        raise settings.invalid("rope.dimension_count", f"only whole heads are rotated; it must be {head_dim}")
    theta = settings.get("rope.freq_base", float, 10_000.0)
    divisors = tuple(file.read(_DIVISORS).tolist()) if _DIVISORS in file else None
    if divisors is not None and len(divisors) != head_dim // 2:
        raise settings.invalid("rope.dimension_count", f"{_DIVISORS} has {len(divisors)} values, not {head_dim // 2}")
    written = settings.get("rope.scaling.type", str, "none")
    if written == "none":
        linear = settings.get("rope.scale_linear", float, 1.0)
        kind: RopeKind = "default" if linear == 1.0 else "linear"
        return RopeConfig(theta=theta, kind=kind, factor=linear, frequency_divisors=divisors)
    kind = _kind(settings, "rope.scaling.type")
    factor = settings.get("rope.scaling.factor", float)
    attention_factor = None
    if "rope.scaling.attn_factor" in settings:
        # GGUF's factor comes on top of YaRN's own temperature.
        attention_factor = settings.get("rope.scaling.attn_factor", float) * yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context_length=settings.positive("rope.scaling.original_context_length", context_length),
        beta_fast=settings.get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=settings.get("rope.scaling.yarn_beta_slow", float, 1.0),
        attention_factor=attention_factor,
        frequency_divisors=divisors,
    )


def _kind(settings: Settings, key: str) -> RopeKind:
    written = settings.get(key, str)
    if written not in get_args(RopeKind):
        raise settings.invalid(key, f"it must be one of {', '.join(get_args(RopeKind))}")
    return cast(RopeKind, written)
