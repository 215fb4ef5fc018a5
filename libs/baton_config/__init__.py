"""The one configuration of all services."""

from baton_config.errors import ConfigError, ConfigProblem, ModelNotFoundError
from baton_config.models import resolve_model, served_name
from baton_config.sections import (
    AgentSettings,
    ClusterSettings,
    DecodeSettings,
    GatewaySettings,
    ModelSettings,
    PrefillSettings,
    TelemetrySettings,
    TlsSettings,
    WorkerSettings,
)
from baton_config.settings import Settings, load_settings

__all__ = [
    "AgentSettings",
    "ClusterSettings",
    "ConfigError",
    "ConfigProblem",
    "DecodeSettings",
    "GatewaySettings",
    "ModelNotFoundError",
    "ModelSettings",
    "PrefillSettings",
    "Settings",
    "TelemetrySettings",
    "TlsSettings",
    "WorkerSettings",
    "load_settings",
    "resolve_model",
    "served_name",
]
