"""What the agent's behaviour depends on: limits and times, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kv.immediate import SLOTS


@dataclass(frozen=True)
class AgentOptions:
    """Defaults suit one machine and a fast network; each is an upper bound on how long something unproven may last."""

    # How long the sending agent may take to confirm that a transfer has stopped, before the receiver fences.
    stop_timeout: float = 2.0
    # How long a cancelled transfer's writes may take to drain, before its connection is torn down: less than
    # stop_timeout, so that a receiver that asked for it gets an answer.
    drain_timeout: float = 1.5
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 1.0
    heartbeat_misses: int = 5
    # Before a heartbeat that was refused at once is repeated: a dead peer is known after misses * retry.
    heartbeat_retry: float = 0.05
    # A connection or endpoint that no transfer has used for so long is closed.
    idle_timeout: float = 60.0
    # How long TransferAborted is repeated while the receiver can't be reached.
    abort_timeout: float = 30.0
    # From SIGTERM until what still runs is given up.
    shutdown_timeout: float = 8.0
    slots: int = SLOTS
    max_sessions: int = 64
    max_transfers: int = 1 << 16
    max_pages: int = 1 << 20
