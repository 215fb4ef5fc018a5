"""Metrics, their exposition, and logs."""

from baton_telemetry.exposition import MetricsServer
from baton_telemetry.logs import configure as configure_logging
from baton_telemetry.metrics import (
    AgentMetrics,
    DecodeMetrics,
    GatewayMetrics,
    PrefillMetrics,
    WorkerMetrics,
    new_registry,
)

__all__ = [
    "AgentMetrics",
    "DecodeMetrics",
    "GatewayMetrics",
    "MetricsServer",
    "PrefillMetrics",
    "WorkerMetrics",
    "configure_logging",
    "new_registry",
]
