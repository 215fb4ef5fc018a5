"""Gauges that mirror a worker's state; they are read when somebody scrapes, and cost nothing otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton_telemetry.metrics import WorkerMetrics
from baton_worker.engine_host import EngineHost

# What the agent was asked for when it did not answer in time.
CLOSING_INBOX = "closing_inbox"
CANCELLING_TRANSFER = "cancelling_transfer"
QUARANTINE_REASONS = (CLOSING_INBOX, CANCELLING_TRANSFER)


def quarantined_pages(host: EngineHost, reason: str) -> int:
    """Pages that owners in quarantine for this reason hold."""
    return sum(entry.pages for entry in host.reserver.pool.quarantines.values() if entry.reason == reason)


def observe(metrics: WorkerMetrics, engine: Callable[[], EngineHost | None]) -> None:
    """`engine` gives the present engine, or None."""

    def read(value: Callable[[EngineHost], float]) -> Callable[[], float]:
        def now() -> float:
            host = engine()
            return value(host) if host is not None and host.alive else 0.0

        return now

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
        read(lambda host: host.reserver.pool.oldest_quarantine_age(time.monotonic()))
    )

    def prefix_cache() -> dict[str, float]:
        host = engine()
        if host is None or not host.alive:
            return {}
        return {
            "queries": host.reserver.prefixes.queried_tokens,
            "hits": host.reserver.prefixes.found_tokens,
            "evictions": host.reserver.pool.evicted,
        }

    metrics.read_prefix_cache(prefix_cache)
