"""What can go wrong between a path and a running model. Each error names the file, tensor or setting concerned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class ModelError(Exception):
    """Base of this library's errors.

    `status` is the name of a gRPC code, `reason` a stable identifier, `fields` the values concerned, as text.
    """

    status = "INTERNAL"
    reason = "MODEL_ERROR"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}


class CheckpointNotFound(ModelError):
    """The path is neither a GGUF file nor a directory with config.json and safetensors."""

    status = "NOT_FOUND"
    reason = "CHECKPOINT_NOT_FOUND"


class CheckpointUnreadable(ModelError):
    """A file of the checkpoint is there but is not what its name says."""

    status = "FAILED_PRECONDITION"
    reason = "CHECKPOINT_UNREADABLE"


class UnknownFamily(ModelError):
    """No family of models in the registry answers to the checkpoint's architecture."""

    status = "UNIMPLEMENTED"
    reason = "MODEL_UNKNOWN_FAMILY"

    def __init__(self, architecture: str, known: Sequence[str], path: Path) -> None:
        super().__init__(
            f"{path}: architecture {architecture!r} is not supported; supported are {', '.join(known)}",
            architecture=architecture,
            path=path,
        )


class InvalidConfig(ModelError):
    """A setting of the checkpoint is missing, malformed, or asks for something that the family doesn't compute."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_INVALID_CONFIG"


class MissingTensor(ModelError):
    """The checkpoint has no tensor of this name."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_MISSING_TENSOR"

    def __init__(self, tensor: str, path: Path) -> None:
        super().__init__(f"{path}: tensor {tensor!r} is missing", tensor=tensor, path=path)


class UnknownTensor(ModelError):
    """The checkpoint has a tensor that the family has no use for: a model without it is another one."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_UNKNOWN_TENSOR"

    def __init__(self, tensor: str, path: Path) -> None:
        super().__init__(
            f"{path}: tensor {tensor!r} has no place in a model of this architecture", tensor=tensor, path=path
        )


class WrongShape(ModelError):
    """A tensor's shape contradicts the checkpoint's configuration."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_WRONG_SHAPE"

    def __init__(self, tensor: str, expected: Sequence[int], found: Sequence[int], path: Path) -> None:
        super().__init__(
            f"{path}: tensor {tensor!r} has shape {list(found)}; its configuration asks for {list(expected)}",
            tensor=tensor,
            expected=list(expected),
            found=list(found),
            path=path,
        )


class UnsupportedTensorType(ModelError):
    """A tensor is stored in a type that cannot be turned into floating point here."""

    status = "UNIMPLEMENTED"
    reason = "MODEL_UNSUPPORTED_TENSOR_TYPE"

    def __init__(self, tensor: str, stored: str, path: Path) -> None:
        super().__init__(
            f"{path}: tensor {tensor!r} is stored as {stored}, which cannot be dequantised",
            tensor=tensor,
            stored=stored,
            path=path,
        )


class InvalidBatch(ModelError):
    """A forward batch or cache contradicts itself, the model, or each other."""

    status = "INVALID_ARGUMENT"
    reason = "MODEL_INVALID_BATCH"


class DeviceUnavailable(ModelError):
    """The device that a model was to run on is not there, or what it takes to compute on it isn't."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_DEVICE_UNAVAILABLE"


class GroupBroken(ModelError):
    """A tensor-parallel rank is gone, or made another call than the others: the group's results can't be had."""

    status = "UNAVAILABLE"
    reason = "MODEL_GROUP_BROKEN"
