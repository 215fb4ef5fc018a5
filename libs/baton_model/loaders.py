"""From a path to a model: a GGUF file, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from . import block_fp8, hugging_face
from .config import ModelConfig
from .errors import CheckpointNotFound, InvalidConfig
from .families import registry
from .families.base import Family
from .gguf_file import GgufFile, GgufWeights
from .gguf_latent import LatentGgufWeights
from .layers.linear import Quantization
from .model import Model
from .parallel import SOLO, RankGroup
from .platform import Platform, cpu_platform
from .weights import WeightReader, WeightSource

DtypeName = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_config(path: str | Path) -> ModelConfig:
    """Reads the configuration only; no weights.

    Raises `CheckpointNotFound`, `CheckpointUnreadable`, `UnknownFamily`, `InvalidConfig`.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)[1]
    return _open_gguf(path)[1]


def load_model(
    path: str | Path,
    dtype: DtypeName,
    platform: Platform | None = None,
    progress: Callable[[float], None] | None = None,
    group: RankGroup = SOLO,
    mtp: bool = False,
    quantization: Quantization = "none",
) -> Model:
    """Loads a model with its weights in `dtype`, of them what rank `group.rank` needs. `progress` is told the share of
    the weights that are loaded. `platform`: by default the CPU. `mtp`: with its modules for multi-token prediction,
    each of which is a layer more, in the cache too. `quantization` "int8": the weights of linears take eight bits (see
    `Int8Linear`).

    Raises what `load_config` raises, and `MissingTensor`, `WrongShape`, `UnsupportedTensorType`; `ShardingImpossible`
    and `InvalidConfig` where the heads can't be split over the ranks, or there are no modules for `mtp`.
    """
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}", dtype=dtype)
    platform = platform or cpu_platform()
    if DTYPES[dtype] not in platform.dtypes:
        possible = ", ".join(name for name, each in DTYPES.items() if each in platform.dtypes)
        raise InvalidConfig(
            f"dtype is {dtype!r}; on {platform.device.type!r} models compute in {possible}",
            dtype=dtype,
            device=platform.device.type,
        )
    if quantization not in platform.quantizations:
        raise InvalidConfig(
            f"quantization is {quantization!r}; on {platform.device.type!r} it must be one of "
            f"{', '.join(platform.quantizations)}",
            quantization=quantization,
            device=platform.device.type,
        )
    path = Path(path)
    source: WeightSource
    if path.is_dir():
        family, config = _open_directory(path)
        source = block_fp8.open_weights(path)
    else:
        family, config, file = _open_gguf(path)
        kind = GgufWeights if config.latent is None else LatentGgufWeights
        source = kind(
            file,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            interleaved_rotary=family.gguf_interleaved_rotary,
        )
    if mtp and not config.mtp_layers:
        raise InvalidConfig(f"{path}: this model declares no modules for multi-token prediction", path=path)
    if not mtp:
        config = replace(config, mtp_layers=0)
    weights = WeightReader(source, DTYPES[dtype], platform, progress, group, quantization)
    model = family.build(config, weights, platform.attention)
    weights.finish()
    return model


def _open_directory(path: Path) -> tuple[Family, ModelConfig]:
    settings = hugging_face.read_config(path)
    architectures = settings.strings("architectures")
    if len(architectures) != 1:
        raise settings.invalid("architectures", "it must be a list with the name of one architecture")
    family = registry.for_hugging_face(architectures[0], path)
    return family, family.config_from_hugging_face(settings)


def _open_gguf(path: Path) -> tuple[Family, ModelConfig, GgufFile]:
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: no such GGUF file or Hugging Face directory", path=path)
    file = GgufFile(path)
    family = registry.for_gguf(file.architecture, path)
    return family, family.config_from_gguf(file), file
