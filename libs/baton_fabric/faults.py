"""Faults for tests: a provider that looks worse than it is. Off unless rules are given.

A plan is JSON: ``{"seed": 7, "rules": [{"at": "post", "action": "drop", "nth": 3, "times": 1}]}``. Each write that is
posted, each completion of one and each immediate that arrives is compared with the rules in their order, and the first
that applies decides. A rule's fields:

============= ==========================================================================================================
at            where: post, completion (of a write of ours), arrival (of a peer's immediate)
action        what happens there, see below
peer          only writes to this peer, by the engine's number for it; not for arrivals
transfer      only writes of this transfer; not for arrivals
domain        only in our domain with this number
nth           of the operations that match so far, the first to which the rule applies; 1 unless given
times         to how many of them it applies; to all that follow unless given
probability   with which it applies, 1 unless given; drawn from the plan's seed
ms            how long, for delay
errno         error number, for fail; EIO unless given
============= ==========================================================================================================

========== =========== =================================================================================================
at         action      then
========== =========== =================================================================================================
post       refuse      the provider is full (EAGAIN): the write is tried again, which is an operation of its own
post       fail        the provider returns an error
post       drop        the write is taken and never done: nothing arrives, nothing completes
post       error       the write is taken and not done, and completes as an error
post       delay       that peer gets no write in that way (from the same domain to the same endpoint) for some time
post       hold        that peer gets no write in that way until `release_faults`
completion drop        the write never completes, although its bytes are there
completion error       the write completes as an error, although its bytes are there
completion delay       the completion is seen later
completion hold        the completion is seen after `release_faults`
arrival    drop        the immediate is never counted, although the bytes are there
arrival    delay       the immediate is counted later
arrival    hold        the immediate is counted after `release_faults`
========== =========== =================================================================================================

The metric ``faults`` counts how often a rule applied.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# In the order of the native core's enumerations.
AT = ("post", "completion", "arrival")
ACTIONS = ("refuse", "fail", "drop", "error", "delay", "hold")
_ALLOWED = {
    "post": set(ACTIONS),
    "completion": {"drop", "error", "delay", "hold"},
    "arrival": {"drop", "delay", "hold"},
}

RuleTuple = tuple[int, int, int, int, int, int, int, float, int]


class FaultsInvalid(Exception):
    """A fault plan that can't be read; nothing was changed."""

    status = "INVALID_ARGUMENT"
    reason = "FAULTS_INVALID"

    def __init__(self, message: str, **values: object) -> None:
        super().__init__(message)
        self.fields = {name: str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """See the module. Raises FaultsInvalid."""

    at: str
    action: str
    peer: int = 0
    transfer: int = 0
    domain: int | None = None
    nth: int = 1
    times: int = 0
    probability: float = 1.0
    ms: float = 0.0
    errno: int = errno.EIO

    def __post_init__(self) -> None:
        if self.action not in _ALLOWED.get(self.at, ()):
            places = ", ".join(f"{at}: {'|'.join(sorted(actions))}" for at, actions in _ALLOWED.items())
            raise FaultsInvalid(f"there is no fault {self.action!r} at {self.at!r}; there are {places}", at=self.at)
        for name in ("peer", "transfer", "domain", "nth", "times", "errno"):
            value = getattr(self, name)
            if name == "domain" and value is None:
                continue
            least = 1 if name in ("nth", "errno") else 0
            if type(value) is not int or value < least:
                raise FaultsInvalid(f"{name} of a fault is {value!r}; it must be an integer from {least}", field=name)
        for name, most in (("probability", 1.0), ("ms", 3.6e6)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise FaultsInvalid(f"{name} of a fault is {value!r}; it must be from 0 to {most:g}", field=name)

    def native(self) -> RuleTuple:
        amount = self.errno if self.action == "fail" else round(self.ms * 1e6)
        return (
            AT.index(self.at),
            ACTIONS.index(self.action),
            self.peer,
            self.transfer,
            -1 if self.domain is None else self.domain,
            self.nth,
            self.times,
            float(self.probability),
            amount,
        )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rules, and the seed of their probabilities."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0


def parse_faults(text: str) -> FaultPlan:
    """A plan from JSON; an empty text has no rules. Raises FaultsInvalid."""
    if not text.strip():
        return FaultPlan()
    try:
        plan: Any = json.loads(text)
    except ValueError as error:
        raise FaultsInvalid(f"a plan of faults is not JSON: {error}") from error
    if not isinstance(plan, dict) or not set(plan) <= {"seed", "rules"} or not isinstance(plan.get("rules", []), list):
        raise FaultsInvalid('a plan of faults must be an object with "seed" and "rules", a list')
    seed = plan.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise FaultsInvalid(f"the seed of a plan of faults is {seed!r}; it must be an integer of 64 bits", field="seed")
    return FaultPlan(tuple(_rule(rule) for rule in plan.get("rules", [])), seed)


def _rule(rule: Any) -> FaultRule:
    names = {field.name for field in fields(FaultRule)}
    if not isinstance(rule, Mapping) or not {"at", "action"} <= set(rule) <= names:
        raise FaultsInvalid(f"a fault has at and action, and may have {', '.join(sorted(names))}; not {rule!r}")
    return FaultRule(**rule)
