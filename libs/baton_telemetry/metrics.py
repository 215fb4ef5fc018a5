"""The catalogue of metrics: every name that Baton exports, with its unit and labels.

One class a service, one registry a process. Gauges that mirror state are best given with ``set_function``, so that they
cost nothing until somebody asks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

# Seconds. Spaced by about 1.6 where latencies of requests lie, so that a p99 read from buckets is within 30 %.
LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.08,
    0.13,
    0.2,
    0.35,
    0.6,
    1,
    1.6,
    2.5,
    4,
    7,
    12,
    20,
    60,
)
TRANSFER_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
EXTENTS_BUCKETS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 4096)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def new_registry() -> CollectorRegistry:
    """A registry of its own, with the process's CPU time, memory and descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class _Catalogue:
    def __init__(self, service: str, registry: CollectorRegistry | None) -> None:
        self.registry = registry or new_registry()
        self._prefix = f"baton_{service}_"

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._prefix + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(self._prefix + name, text, labels, registry=self.registry, buckets=buckets)


class GatewayMetrics(_Catalogue):
    """``api`` is "grpc" or "http"; ``outcome`` is "ok" or a gRPC code name in lower case."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("gateway", registry)
        self.requests = self._counter("requests_total", "Requests that ended", "api", "outcome")
        self.requests_in_flight = self._gauge("requests_in_flight", "Requests being served", "api")
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its last token", LATENCY_BUCKETS, "api"
        )
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", LATENCY_BUCKETS
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between two messages with tokens of one request", LATENCY_BUCKETS
        )
        self.tokenize_seconds = self._histogram(
            "tokenize_seconds", "Rendering and tokenising a prompt", TRANSFER_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of accepted prompts")
        self.completion_tokens = self._counter("completion_tokens_total", "Tokens sent to clients")
        self.workers = self._gauge("workers", "Workers with a live lease", "role")
        self.leases_expired = self._counter("leases_expired_total", "Workers that fell silent", "role")


class WorkerMetrics(_Catalogue):
    """What prefill and decode workers share. ``outcome`` is "ok", "cancelled" or a reason in lower case."""

    def __init__(self, service: str, registry: CollectorRegistry | None = None) -> None:
        super().__init__(service, registry)
        self.requests = self._counter("requests_total", "Requests that ended", "outcome")
        self.running_requests = self._gauge(
            "running_requests", "Requests of which something is computed or being computed"
        )
        self.waiting_requests = self._gauge("waiting_requests", "Requests that wait for pages or for their first step")
        self.queued_prompt_tokens = self._gauge("queued_prompt_tokens", "Prompt tokens not yet computed")
        self.queue_seconds = self._histogram("queue_seconds", "Waiting for pages", LATENCY_BUCKETS)
        self.free_pages = self._gauge(
            "free_pages", "Pages of the KV cache that nobody holds, those of the prefix cache included"
        )
        self.cached_pages = self._gauge("cached_pages", "Pages in the prefix cache, whether somebody holds them or not")
        self.total_pages = self._gauge("pages", "Pages of the KV cache")
        self.quarantined_pages = self._gauge(
            "quarantined_pages", "Pages kept back because a write into them can't be ruled out", "reason"
        )
        self.oldest_quarantine_seconds = self._gauge("oldest_quarantine_seconds", "Age of the oldest quarantine")
        self.step_seconds = self._histogram("step_seconds", "One forward step of the model process", LATENCY_BUCKETS)
        self.step_tokens = self._histogram("step_tokens", "Tokens in one forward step", TOKEN_BUCKETS)
        self.computed_prompt_tokens = self._counter("computed_prompt_tokens_total", "Prompt tokens computed here")
        self.transfers = self._counter("transfers_total", "Transfers that ended", "outcome")
        self.engine_restarts = self._counter("engine_restarts_total", "Times the model process was started again")
        self.agent_reconnects = self._counter("agent_reconnects_total", "Times the worker attached to its agent again")

    def read_prefix_cache(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Exports the engine's own counts, which begin anew with each engine; keys are those of
        PREFIX_CACHE_COUNTERS."""
        counters = {f"{self._prefix}prefix_cache_{key}": (key, text) for key, text in PREFIX_CACHE_COUNTERS.items()}
        self.registry.register(PulledMetrics(counters, {}, read))


# As baton_<role>_prefix_cache_<key>_total. Queries and hits count tokens, as vLLM's do.
PREFIX_CACHE_COUNTERS: dict[str, str] = {
    "queries": "Prompt tokens looked up in the prefix cache",
    "hits": "Prompt tokens found there",
    "evictions": "Pages of the prefix cache that were given to others",
}


class PrefillMetrics(WorkerMetrics):
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("prefill", registry)
        self.transfer_seconds = self._histogram(
            "transfer_seconds", "First write posted to last local completion", TRANSFER_BUCKETS
        )
        self.exposed_seconds = self._histogram(
            "exposed_seconds", "End of a prompt's last layer to the last local completion", TRANSFER_BUCKETS
        )


class DecodeMetrics(WorkerMetrics):
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("decode", registry)
        self.generated_tokens = self._counter("generated_tokens_total", "Tokens drawn")
        self.prefill_attempts = self._counter("prefill_attempts_total", "Calls of prefill workers", "outcome")
        self.local_prefills = self._counter("local_prefills_total", "Prompts computed by the decode worker", "cause")
        self.inbox_seconds = self._histogram(
            "inbox_seconds", "Calling a prefill worker until the inbox is full", LATENCY_BUCKETS
        )
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival here to its first token", LATENCY_BUCKETS
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between two tokens of one request", LATENCY_BUCKETS
        )


class AgentMetrics(_Catalogue):
    """``outcome`` of a transfer: done, failed, cancelled; of an inbox: full, quiesced, fenced."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("agent", registry)
        self.sessions = self._gauge("sessions", "Workers whose memory is attached")
        self.sessions_ended = self._counter("sessions_ended_total", "Sessions that ended", "cause")
        self.registered_bytes = self._gauge("registered_bytes", "Memory registered with the fabric")
        self.peers = self._gauge("peers", "Agents that this one has a connection with")
        self.open_transfers = self._gauge("open_transfers", "Transfers being sent")
        self.transfers = self._counter("transfers_total", "Transfers that ended at the sender", "outcome")
        self.open_inboxes = self._gauge("open_inboxes", "Transfers being received")
        self.inboxes = self._counter("inboxes_total", "Inboxes that were closed", "outcome")
        # Outcome: match, mismatch, failed.
        self.checksums = self._counter(
            "checksums_total", "Transfers whose bytes were compared with the sender's checksum of them", "outcome"
        )
        self.fences = self._counter("fences_total", "Receiving endpoints closed to rule out further writes", "reason")
        self.quarantined_inboxes = self._gauge(
            "quarantined_inboxes", "Inboxes that are to end, but may still be written, by what they wait for", "stage"
        )
        self.oldest_quarantine_seconds = self._gauge("oldest_quarantine_seconds", "Age of the oldest such inbox")
        self.heartbeat_misses = self._counter("heartbeat_misses_total", "Heartbeats that other agents did not answer")
        self.refused = self._counter("refused_total", "Calls refused", "reason")
        self.transfer_seconds = self._histogram(
            "transfer_seconds", "First write posted to last local completion", TRANSFER_BUCKETS
        )
        self.inbox_fill_seconds = self._histogram(
            "inbox_fill_seconds", "First immediate of a transfer to the last", TRANSFER_BUCKETS
        )
        self.first_post_seconds = self._histogram(
            "first_post_seconds", "Layer counter moved until the first write is posted", TRANSFER_BUCKETS
        )
        self.extents_per_write = self._histogram(
            "extents_per_write",
            "Extents that one write of a finished transfer carried on average: how often both pools gave neighbours",
            EXTENTS_BUCKETS,
        )

    def read_fabric(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Exports the native core's own counters and levels, read when asked for."""
        counters = {f"baton_agent_fabric_{key}": (key, text) for key, text in FABRIC_COUNTERS.items()}
        levels = {f"baton_agent_fabric_{key}": (key, text) for key, text in FABRIC_LEVELS.items()}
        self.registry.register(PulledMetrics(counters, levels, read))

    def read_domains(self, names: Sequence[str], read: Callable[[], Sequence[Mapping[str, float]]]) -> None:
        """Exports the native core's counters of each of the fabric's domains, by name, read when asked for."""
        self.registry.register(DomainMetrics(names, read))


# Keys of the native core's metrics(), as baton_agent_fabric_<key>_total; keys that it doesn't report are left out.
FABRIC_COUNTERS: dict[str, str] = {
    "bytes": "Bytes written to other agents",
    "writes": "Writes posted",
    "extents": "Extents carried by the writes",
    "completions": "Local completions",
    "delivery_completions": "Completions that prove delivery",
    "write_errors": "Completions with an error",
    "eagain": "Posts put off because the provider's queue was full",
    "peers_failed": "Sending endpoints closed because of an error",
    "immediates": "Immediates received",
    "extents_received": "Extents that the immediates carried",
    "stale_immediates": "Immediates whose generation was not the slot's",
    "violations": "Immediates with more extents than expected",
    "late_chunks": "Chunk plans for transfers that had ended",
    "receive_errors": "Errors on receiving endpoints",
    "wakeups": "Times the progress thread woke up",
    "faults": "Posts, completions and arrivals that a test's faults changed",
}


# Keys of the same, as baton_agent_fabric_<key>.
FABRIC_LEVELS: dict[str, str] = {
    "regions": "Registered pieces of memory",
    "endpoints": "Receiving endpoints",
    "peers": "Sending endpoints",
    "writes_in_flight": "Writes posted and not yet completed",
    "bytes_in_flight": "Bytes of these writes",
}

# Keys of the core's domain_metrics(), as baton_agent_fabric_domain_<key>_total.
DOMAIN_COUNTERS: dict[str, str] = {
    "bytes": "Bytes written to other agents through this domain",
    "writes": "Writes posted through this domain",
    "immediates": "Immediates that came by this domain",
}


class DomainMetrics(Collector):
    """Counters of the fabric's domains, which live elsewhere."""

    def __init__(self, names: Sequence[str], read: Callable[[], Sequence[Mapping[str, float]]]) -> None:
        self._names = list(names)
        self._read = read

    def describe(self) -> Iterator[Metric]:
        yield from self._families().values()

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for name, values in zip(self._names, self._read(), strict=True):
            for key, family in families.items():
                family.add_metric([name], values[key])
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, CounterMetricFamily]:
        return {
            key: CounterMetricFamily(f"baton_agent_fabric_domain_{key}", text, labels=["domain"])
            for key, text in DOMAIN_COUNTERS.items()
        }


class PulledMetrics(Collector):
    """Counters and gauges that live elsewhere: both map an exported name to (key, help)."""

    def __init__(
        self,
        counters: Mapping[str, tuple[str, str]],
        gauges: Mapping[str, tuple[str, str]],
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._kinds: tuple[tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], dict[str, tuple[str, str]]], ...]
        self._kinds = ((CounterMetricFamily, dict(counters)), (GaugeMetricFamily, dict(gauges)))
        self._read = read

    def describe(self) -> Iterator[Metric]:
        for kind, names in self._kinds:
            for name, (_, text) in names.items():
                yield kind(name, text)

    def collect(self) -> Iterator[Metric]:
        values = self._read()
        for kind, names in self._kinds:
            for name, (key, text) in names.items():
                if key in values:
                    yield kind(name, text, value=values[key])
