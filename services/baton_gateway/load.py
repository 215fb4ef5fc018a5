"""How loaded each worker is: what it last reported, and what this gateway has sent to it since. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.v1 import registry_pb2

from baton_gateway.registry import WorkerKey, worker_key
from baton_gateway.routing import Candidate


@dataclass
class _Account:
    requests: int = 0
    prompt_tokens: int = 0
    turn: int = 0
    # As they stood when the worker reported last: its report contains them.
    reported_requests: int = 0
    reported_prompt_tokens: int = 0
    # The worker's lease is over.
    gone: bool = False

    @property
    def idle(self) -> bool:
        return self.requests == 0 and self.prompt_tokens == 0


@dataclass
class LoadBook:
    """A request counts from the moment it is routed: two that come at once don't both take the idle worker because its
    next report is a second away."""

    _accounts: dict[WorkerKey, _Account] = field(default_factory=dict)
    _turns: int = 0

    def reported(self, key: WorkerKey) -> None:
        """The worker's load report has just come in."""
        account = self._account(key)
        account.gone = False
        account.reported_requests = account.requests
        account.reported_prompt_tokens = account.prompt_tokens

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone. Its account stays as long as requests are with it."""
        self._account(key).gone = True
        self._settle(key)

    @contextmanager
    def request(self, key: WorkerKey) -> Iterator[None]:
        """A request is with this decode worker."""
        account = self._account(key)
        self._turns += 1
        account.turn = self._turns
        account.requests += 1
        try:
            yield
        finally:
            account.requests -= 1
            self._settle(key)

    def prompt(self, key: WorkerKey, tokens: int) -> PromptOffer:
        """A prompt is offered to this prefill worker until the offer is closed."""
        self._turns += 1
        self._account(key).turn = self._turns
        return PromptOffer(self._account(key), tokens, lambda: self._settle(key))

    def candidates(self, workers: Sequence[registry_pb2.WorkerInfo]) -> list[Candidate]:
        return [self._candidate(worker) for worker in workers]

    def _candidate(self, worker: registry_pb2.WorkerInfo) -> Candidate:
        account = self._accounts.get(worker_key(worker), _Account())
        load = worker.load
        requests = load.running_requests + load.waiting_requests + account.requests - account.reported_requests
        tokens = load.queued_prompt_tokens + account.prompt_tokens - account.reported_prompt_tokens
        # A report may predate the arrival of what was sent before it.
        return Candidate(worker, max(requests, account.requests), max(tokens, 0), account.turn)

    def _settle(self, key: WorkerKey) -> None:
        account = self._accounts.get(key)
        if account is not None and account.gone and account.idle:
            del self._accounts[key]

    def _account(self, key: WorkerKey) -> _Account:
        return self._accounts.setdefault(key, _Account())


class PromptOffer:
    """Prompt tokens that a prefill worker is believed to have before it."""

    def __init__(self, account: _Account, tokens: int, on_close: Callable[[], None]) -> None:
        self._account = account
        self._tokens = tokens
        self._on_close = on_close
        account.prompt_tokens += tokens

    def close(self) -> None:
        """The prompt is computed, or given up. Idempotent."""
        self._account.prompt_tokens -= self._tokens
        self._tokens = 0
        self._on_close()
