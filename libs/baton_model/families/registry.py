"""The families that there are."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnknownFamily
from . import deepseek, llama, qwen2, qwen3, qwen3_moe
from .base import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, deepseek.FAMILY)


def for_hugging_face(architecture: str, path: Path) -> Family:
    """The family of an entry of config.json's `architectures`. Raises `UnknownFamily`."""
    for family in FAMILIES:
        if architecture in family.hugging_face:
            return family
    raise UnknownFamily(architecture, [name for family in FAMILIES for name in family.hugging_face], path)


def for_gguf(architecture: str, path: Path) -> Family:
    """The family of a `general.architecture`. Raises `UnknownFamily`."""
    for family in FAMILIES:
        if architecture in family.gguf:
            return family
    raise UnknownFamily(architecture, [name for family in FAMILIES for name in family.gguf], path)
