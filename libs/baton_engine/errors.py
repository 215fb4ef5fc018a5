"""Errors of the engine. Every one carries a gRPC status name, a reason for google.rpc.ErrorInfo, and fields."""

from __future__ import annotations


class EngineError(Exception):
    """Base of the engine's errors.

    `status` is the name of a gRPC status code, `reason` an UPPER_SNAKE word for programs, `fields` details as text.
    """

    status = "INTERNAL"
    reason = "ENGINE_ERROR"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}


class SequenceInvalid(EngineError):
    """A sequence that the scheduler can't run: empty prompt, too few pages, nothing to compute, an id in use."""

    status = "INVALID_ARGUMENT"
    reason = "SEQUENCE_INVALID"


class StepMismatch(EngineError):
    """A step result that doesn't belong to the step in flight."""

    reason = "STEP_MISMATCH"


class FrameInvalid(EngineError):
    """The byte stream between worker and model process is not made of this protocol's frames."""

    reason = "FRAME_INVALID"


class SpecInvalid(EngineError):
    """An EngineSpec that contradicts itself or the model."""

    status = "INVALID_ARGUMENT"
    reason = "ENGINE_SPEC_INVALID"


class EngineStartFailed(EngineError):
    """The model process could not load the model, or not in time. `fields` holds `cause`, the child's own reason."""

    status = "FAILED_PRECONDITION"
    reason = "ENGINE_START_FAILED"


class EngineDied(EngineError):
    """The model process is gone, and with it everything that was in its cache."""

    status = "UNAVAILABLE"
    reason = "ENGINE_DIED"


class AttachFailed(EngineError):
    """The agent did not take over the model process's memory. `fields` holds `cause` and `session`."""

    status = "UNAVAILABLE"
    reason = "ATTACH_FAILED"


class StepFailedError(EngineError):
    """A forward step raised in the model process, which lives on.

    What the step would have written is undefined, and its layer counter stands where it stopped. Until every transfer
    with a chunk in the failed step is cancelled no other step may be run: the next one moves the counter past the
    failed step, and the agent would then send what was never computed. `fields` holds `step` and `cause`.
    """

    reason = "STEP_FAILED"


class NonFiniteLogits(EngineError):
    """The model answered with NaN or infinity where a token was to be drawn."""

    reason = "NON_FINITE_LOGITS"
