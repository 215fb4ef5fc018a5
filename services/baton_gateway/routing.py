"""Which workers serve a request. Pure: a snapshot in, a route out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from baton.v1 import registry_pb2

from baton_gateway.errors import NoDecodeWorker, NoPrefillWorker, NoWorker, NoWorkerForModel
from baton_gateway.registry import WorkerKey, worker_key

PREFILL = registry_pb2.WORKER_ROLE_PREFILL
DECODE = registry_pb2.WORKER_ROLE_DECODE
COLOCATED = registry_pb2.WORKER_ROLE_COLOCATED


# A decode worker that has all of a prompt gets it unless it has this many requests more than another: what is there
# need not be transferred, and a step grows by little with each request.
PREFIX_REQUESTS = 4


@dataclass(frozen=True)
class Candidate:
    """One live worker, as loaded as the gateway believes it to be: its last report and what was sent to it since.

    requests: running and waiting. prompt_tokens: not yet computed. turn: grows with each request sent to it, so that
    equals take turns.
    """

    worker: registry_pb2.WorkerInfo
    requests: int = 0
    prompt_tokens: int = 0
    turn: int = 0

    @property
    def key(self) -> WorkerKey:
        return worker_key(self.worker)


@dataclass(frozen=True)
class RoutingRules:
    """model: name that workers must serve. prefill_candidates: how many prefill workers to offer.

    decode_computes_prompts: decode workers may compute a prompt themselves, so one without prefill workers is able.
    """

    model: str
    prefill_candidates: int = 3
    decode_computes_prompts: bool = False


@dataclass(frozen=True)
class Route:
    """prefill: best first; empty for a colocated worker and where none is needed."""

    decode: registry_pb2.WorkerInfo
    prefill: tuple[registry_pb2.WorkerInfo, ...]


def choose(
    candidates: Sequence[Candidate],
    rules: RoutingRules,
    prompt_tokens: int,
    max_tokens: int,
    excluded: Collection[WorkerKey] = (),
    held: Mapping[WorkerKey, int] = MappingProxyType({}),
) -> Route:
    """The least loaded decode worker that is able, and the prefill workers of the same model, best first.

    max_tokens: 0 for all that the context leaves. excluded: decode workers that were tried for this request already.
    held: tokens of the prompt that workers are believed to have in their prefix caches. A prefill worker's are as many
    fewer to compute; a decode worker's make up for `PREFIX_REQUESTS`, or their share of it.
    Raises NoWorkerForModel, NoDecodeWorker, NoPrefillWorker.
    """
    serving = [candidate for candidate in candidates if candidate.worker.model.name == rules.model]
    decodes = [c for c in serving if c.worker.role in (DECODE, COLOCATED) and c.key not in excluded]
    prefills = [c for c in serving if c.worker.role == PREFILL]
    if not decodes:
        raise _no_decode(candidates, serving, rules, bool(excluded))

    def has(candidate: Candidate) -> int:
        return held.get(candidate.key, 0)

    def offered(decode: Candidate) -> list[Candidate]:
        """A prompt of one token needs none: the decode worker runs the last token itself."""
        if decode.worker.role == COLOCATED or prompt_tokens <= 1:
            return []
        same = [c for c in prefills if c.worker.model.fingerprint == decode.worker.model.fingerprint]
        return sorted(same, key=lambda c: (c.prompt_tokens - has(c), c.requests, c.turn, c.worker.worker_id))

    def able(decode: Candidate) -> bool:
        alone = decode.worker.role == COLOCATED or prompt_tokens <= 1 or rules.decode_computes_prompts
        return alone or bool(offered(decode))

    ables = [decode for decode in decodes if able(decode)]
    if not ables:
        raise NoPrefillWorker(
            f"{len(decodes)} decode workers are registered for model {rules.model!r}, but no prefill worker with the "
            "same weights",
            model=rules.model,
            decode_workers=len(decodes),
            prefill_workers=len(prefills),
        )
    tokens = prompt_tokens + max_tokens if max_tokens else None
    best = min(ables, key=lambda c: _decode_rank(c, tokens, PREFIX_REQUESTS * has(c) / prompt_tokens))
    return Route(best.worker, tuple(c.worker for c in offered(best)[: rules.prefill_candidates]))


def _decode_rank(candidate: Candidate, tokens: int | None, spared: float) -> tuple[int, float, int, int, str]:
    """Smaller is better: room for the request now, then few requests, then many free pages, then turns.

    tokens: prompt and answer; None: the whole context. spared: requests that are not counted.
    """
    load = candidate.worker.load
    tokens = candidate.worker.model.max_model_len if tokens is None else tokens
    page_size = candidate.worker.layout.page_size
    pages = -(-tokens // page_size) if page_size else 0
    # A request is on one of the worker's engines; they share its requests out evenly.
    engines = candidate.worker.sharding.data_parallel or 1
    if load.total_pages and pages > load.total_pages // engines:
        room = 2
    elif load.total_pages and pages > load.free_pages // engines:
        room = 1
    else:
        room = 0
    return room, candidate.requests - spared, -load.free_pages, candidate.turn, candidate.worker.worker_id


def _no_decode(
    candidates: Sequence[Candidate], serving: Sequence[Candidate], rules: RoutingRules, excluded: bool
) -> NoWorker:
    if candidates and not serving:
        names = sorted({candidate.worker.model.name for candidate in candidates})
        return NoWorkerForModel(
            f"{len(candidates)} workers are registered, none for model {rules.model!r}: they serve {', '.join(names)}",
            model=rules.model,
            served=",".join(names),
        )
    if excluded:
        return NoDecodeWorker(f"no other decode worker is registered for model {rules.model!r}", model=rules.model)
    return NoDecodeWorker(f"no decode worker is registered for model {rules.model!r}", model=rules.model)


def context_length(candidates: Sequence[Candidate], model: str) -> int | None:
    """Longest prompt and answer that every live decode worker of the model takes, in tokens; None if there is none."""
    lengths = [
        c.worker.model.max_model_len
        for c in candidates
        if c.worker.model.name == model and c.worker.role in (DECODE, COLOCATED)
    ]
    return min(lengths, default=None)
