"""Asyncio actors: mailboxes, supervision, deadlines. Standard library only."""

from baton_actors.actor import Actor, ActorStopped, MailboxFull, handles
from baton_actors.deadline import Deadline, DeadlineExceeded
from baton_actors.lifecycle import first_to_end, hold_stop_signals, keeping_stop_signals, serve_until_signalled
from baton_actors.supervisor import Child, RestartLimitExceeded, RestartPolicy, Supervisor

__all__ = [
    "Actor",
    "ActorStopped",
    "Child",
    "Deadline",
    "DeadlineExceeded",
    "MailboxFull",
    "RestartLimitExceeded",
    "RestartPolicy",
    "Supervisor",
    "first_to_end",
    "handles",
    "hold_stop_signals",
    "keeping_stop_signals",
    "serve_until_signalled",
]
