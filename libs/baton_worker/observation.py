"""Gauges that mirror a worker's state; they are read when somebody scrapes, and cost nothing otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton_telemetry.metrics import WorkerMetrics
from baton_worker.engine_host import EngineHost

# What the agent was asked for when it did not answer in time.
CLOSING_INBOX = "closing_inbox"
CANCELLING_TRANSFER = "cancelling_transfer"
QUARANTINE_REASONS = (CLOSING_INBOX, CANCELLING_TRANSFER)


def quarantined_pages(host: EngineHost, reason: str) -> int:
    """Pages that owners in quarantine for this reason hold."""
    return sum(entry.pages for entry in host.reserver.pool.quarantines.values() if entry.reason == reason)


def observe(metrics: WorkerMetrics, engines: Callable[[], Sequence[EngineHost]]) -> None:
    """`engines` gives the present ones: the gauges are sums over them."""

    def living() -> list[EngineHost]:
        return [host for host in engines() if host.alive]

    def read(value: Callable[[EngineHost], float]) -> Callable[[], float]:
        return lambda: sum(map(value, living()))

    metrics.running_requests.set_function(read(lambda host: host.actor.scheduler.running))
    metrics.waiting_requests.set_function(read(lambda host: host.actor.scheduler.waiting + host.reserver.waiting))
    metrics.queued_prompt_tokens.set_function(read(lambda host: host.actor.scheduler.queued_prompt_tokens))
    metrics.free_pages.set_function(read(lambda host: host.reserver.pool.free))
    metrics.cached_pages.set_function(read(lambda host: host.reserver.pool.kept))
    metrics.total_pages.set_function(read(lambda host: host.reserver.pool.total))
    for reason in QUARANTINE_REASONS:
        metrics.quarantined_pages.labels(reason=reason).set_function(
            read(lambda host, reason=reason: quarantined_pages(host, reason))  # type: ignore[misc]
        )
    metrics.oldest_quarantine_seconds.set_function(
        lambda: max((host.reserver.pool.oldest_quarantine_age(time.monotonic()) for host in living()), default=0.0)
    )

    def prefix_cache() -> dict[str, float]:
        reservers = [host.reserver for host in living()]
        if not reservers:
            return {}
        return {
            "queries": sum(reserver.prefixes.queried_tokens for reserver in reservers),
            "hits": sum(reserver.prefixes.found_tokens for reserver in reservers),
            "evictions": sum(reserver.pool.evicted for reserver in reservers),
        }

    metrics.read_prefix_cache(prefix_cache)
