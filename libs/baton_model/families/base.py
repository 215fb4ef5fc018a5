"""What a family tells the loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..attention.base import AttentionBackend
from ..config import ModelConfig
from ..gguf_file import GgufFile
from ..model import Model
from ..settings import Settings
from ..weights import WeightReader


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one family are recognised, understood and built.

    * `hugging_face`: the names in `architectures` of config.json; `gguf`: those in `general.architecture`.
    * `gguf_interleaved_rotary`: see `GgufWeights`.
    * `config_from_hugging_face`, `config_from_gguf` raise `InvalidConfig`.
    * `build` reads every parameter through the reader and raises what it raises.
    """

    name: str
    hugging_face: tuple[str, ...]
    gguf: tuple[str, ...]
    gguf_interleaved_rotary: bool
    config_from_hugging_face: Callable[[Settings], ModelConfig]
    config_from_gguf: Callable[[GgufFile], ModelConfig]
    build: Callable[[ModelConfig, WeightReader, AttentionBackend], Model]
