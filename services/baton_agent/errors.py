"""Typed errors of the transfer agent: what a worker or another agent is told."""

from __future__ import annotations


class AgentError(Exception):
    """Base. `status` is a gRPC code name, `reason` an ErrorInfo reason, `fields` the values concerned."""

    status = "INTERNAL"
    reason = "AGENT_ERROR"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = {name: str(value) for name, value in fields.items()}


class InvalidArgument(AgentError):
    """A field of a request has a value that it can never have."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"


class UnknownSession(AgentError):
    """No memory was handed over under this session, or the session has ended."""

    status = "NOT_FOUND"
    reason = "UNKNOWN_SESSION"

    def __init__(self, session: int) -> None:
        super().__init__(
            f"session {session:#x} is not known here, or has ended: hand the memory over again", session=session
        )


class SessionConflict(AgentError):
    """A hand-off that contradicts what the session's other ranks said, or repeats one."""

    status = "FAILED_PRECONDITION"
    reason = "SESSION_CONFLICT"


class TooManySessions(AgentError):
    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_SESSIONS"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} sessions are attached, as many as this agent takes", limit=limit)


class EventsOverflow(AgentError):
    """The worker left so many events unread that the agent gave the session up."""

    status = "RESOURCE_EXHAUSTED"
    reason = "EVENTS_OVERFLOW"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} events of the session were not read; the session ends", limit=limit)


class VersionUnsupported(AgentError):
    status = "FAILED_PRECONDITION"
    reason = "VERSION_UNSUPPORTED"

    def __init__(self, what: str, version: int, known: int) -> None:
        super().__init__(
            f"{what} has version {version}; this agent knows {known}", what=what, version=version, known=known
        )


class TransportMismatch(AgentError):
    status = "FAILED_PRECONDITION"
    reason = "TRANSPORT_MISMATCH"

    def __init__(self, ours: str, theirs: str) -> None:
        super().__init__(
            f"this agent's transport is {ours!r}, the other's {theirs!r}: both must be the same",
            ours=ours,
            theirs=theirs,
        )


class WrongIncarnation(AgentError):
    """The process that is meant is not this one: it was at the same address before."""

    status = "FAILED_PRECONDITION"
    reason = "WRONG_INCARNATION"

    def __init__(self, meant: int, ours: int) -> None:
        super().__init__(
            f"the call is for incarnation {meant:#018x}, this is {ours:#018x}: the descriptor is of a former process",
            meant=meant,
            ours=ours,
        )


class StaleDescriptor(AgentError):
    """The other agent has been restarted since the descriptor was made."""

    status = "FAILED_PRECONDITION"
    reason = "STALE_DESCRIPTOR"

    def __init__(self, incarnation: int, address: str) -> None:
        super().__init__(
            f"agent {incarnation:#018x} at {address} is gone: its descriptors are refused",
            incarnation=incarnation,
            address=address,
        )


class PeerUnreachable(AgentError):
    status = "UNAVAILABLE"
    reason = "PEER_UNREACHABLE"

    def __init__(self, incarnation: int, address: str, why: str) -> None:
        super().__init__(
            f"agent {incarnation:#018x} at {address} does not answer: {why}", incarnation=incarnation, address=address
        )


class TransferStopped(AgentError):
    """The receiver has stopped this transfer already: it must not be opened any more."""

    status = "FAILED_PRECONDITION"
    reason = "TRANSFER_STOPPED"

    def __init__(self, slot: int, generation: int) -> None:
        super().__init__(
            f"the receiver stopped the transfer to slot {slot}, generation {generation}",
            slot=slot,
            generation=generation,
        )


class TransferExists(AgentError):
    status = "ALREADY_EXISTS"
    reason = "TRANSFER_EXISTS"

    def __init__(self, slot: int, generation: int) -> None:
        super().__init__(
            f"a transfer to slot {slot}, generation {generation} of this receiver is open already",
            slot=slot,
            generation=generation,
        )


class TooManyTransfers(AgentError):
    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_TRANSFERS"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} transfers are open, as many as this agent takes: try again later", limit=limit)


class UnknownTransfer(AgentError):
    status = "NOT_FOUND"
    reason = "UNKNOWN_TRANSFER"

    def __init__(self, transfer: int) -> None:
        super().__init__(f"transfer {transfer} was never opened in this session", transfer=transfer)


class UnknownInbox(AgentError):
    status = "NOT_FOUND"
    reason = "UNKNOWN_INBOX"

    def __init__(self, slot: int, generation: int) -> None:
        super().__init__(
            f"this session has no inbox with slot {slot} and generation {generation}", slot=slot, generation=generation
        )


class FenceFailed(AgentError):
    """The endpoint could not be closed: whether writes can still land is not known. The agent keeps trying."""

    status = "UNAVAILABLE"
    reason = "FENCE_FAILED"


class ShuttingDown(AgentError):
    status = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"

    def __init__(self) -> None:
        super().__init__("this agent is shutting down")


class EngineDown(AgentError):
    """The native engine ended by an error; the agent has to be started again."""

    status = "UNAVAILABLE"
    reason = "ENGINE_DOWN"
