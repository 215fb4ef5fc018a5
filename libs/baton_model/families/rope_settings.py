"""Rotary settings as the two kinds of checkpoints spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from ..config import RopeConfig, RopeKind
from ..gguf_file import GgufFile
from ..layers.rotary import yarn_mscale
from ..settings import Settings

_DIVISORS = "rope_freqs.weight"


def from_hugging_face(settings: Settings, default_theta: float, context_length: int) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older checkpoints have them; where there are
    both, `rope_scaling` counts, as in transformers.

    Raises `InvalidConfig`."""
    section = _section(settings, "rope_scaling") or _section(settings, "rope_parameters")
    theta = settings.above("rope_theta", 1, default_theta)
    _refuse_partial_rotation(settings)
    if section is None:
        return RopeConfig(theta=theta)
    _refuse_partial_rotation(section)
    theta = section.above("rope_theta", 1, theta)
    kind = _kind(section, "rope_type" if "rope_type" in section else "type", "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    # On top level it counts more.
    length = "original_max_position_embeddings"
    original = settings.positive(length, section.positive(length, context_length))
    implied = {"default": context_length / original} if kind == "yarn" else {}
    factor = section.get("factor", float, **implied)
    if factor < 1:
        raise section.invalid("factor", "it must be at least 1")
    low = section.above("low_freq_factor", 0, 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context_length=original,
        low_frequency_factor=low,
        high_frequency_factor=section.above("high_freq_factor", low, 4.0),
        beta_fast=section.above("beta_fast", 0, 32.0),
        beta_slow=section.above("beta_slow", 0, 1.0),
        mscale=section.get("mscale", float, 0.0),
        mscale_all_dim=section.get("mscale_all_dim", float, 0.0),
        attention_factor=section.above("attention_factor", 0) if "attention_factor" in section else None,
        truncate=section.get("truncate", bool, True),
    )


def _section(settings: Settings, key: str) -> Settings | None:
    """A nested mapping; an empty one says as little as none."""
    section = settings.section(key)
    if section is None or not section.values:
        return None
    for name in section.values:
        if isinstance(section.values[name], Mapping):
            raise section.invalid(name, "settings for some of the layers are not supported")
    return section


def _refuse_partial_rotation(settings: Settings) -> None:
    if settings.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise settings.invalid("partial_rotary_factor", "only whole heads are rotated; it must be 1")


def from_gguf(file: GgufFile, settings: Settings, head_dim: int, context_length: int) -> RopeConfig:
    """From the `rope.*` keys of an architecture. Raises `InvalidConfig`."""
    if settings.get("rope.dimension_count", int, head_dim) != head_dim:
        raise settings.invalid("rope.dimension_count", f"only whole heads are rotated; it must be {head_dim}")
    theta = settings.above("rope.freq_base", 1, 10_000.0)
    divisors = tuple(file.read(_DIVISORS).tolist()) if _DIVISORS in file else None
    if divisors is not None and len(divisors) != head_dim // 2:
        raise settings.invalid("rope.dimension_count", f"{_DIVISORS} has {len(divisors)} values, not {head_dim // 2}")
    # llama.cpp's reading: linear unless another type is named, by the older name of the factor if need be; 0 is none.
    written = settings.get("rope.scaling.type", str, "linear")
    if written == "none":
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    kind = _kind(settings, "rope.scaling.type", written)
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in settings else "rope.scale_linear"
    factor = settings.get(factor_key, float, 1.0) or 1.0
    if factor < 0:
        raise settings.invalid(factor_key, "it must not be negative")
    if kind == "linear" and factor == 1.0:
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    # Negative: as the type says.
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if (value := settings.get(key, float, 1.0)) >= 0 and value != 1.0:
            raise settings.invalid(key, "it must be 1")
    attention_factor = None
    if "rope.scaling.attn_factor" in settings:
        # GGUF's factor comes on top of YaRN's own temperature.
        attention_factor = settings.above("rope.scaling.attn_factor", 0) * yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context_length=settings.positive("rope.scaling.original_context_length", context_length),
        beta_fast=settings.above("rope.scaling.yarn_beta_fast", 0, 32.0),
        beta_slow=settings.above("rope.scaling.yarn_beta_slow", 0, 1.0),
        attention_factor=attention_factor,
        frequency_divisors=divisors,
    )


def _kind(settings: Settings, key: str, default: str) -> RopeKind:
    written = settings.get(key, str, default)
    if written not in get_args(RopeKind):
        raise settings.invalid(key, f"it must be one of {', '.join(get_args(RopeKind))}")
    return cast(RopeKind, written)
