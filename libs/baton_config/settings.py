"""The configuration of all services: one model, three sources.

Flags come before environment variables (BATON_GATEWAY__HTTP), which come before the TOML file ([gateway] http), which
comes before the defaults.
"""

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from baton_config.errors import ConfigError, ConfigProblem
from baton_config.sections import (
    AgentSettings,
    ClusterSettings,
    DecodeSettings,
    GatewaySettings,
    ModelSettings,
    PrefillSettings,
    TelemetrySettings,
    TlsSettings,
)

CONFIG_VARIABLE = "BATON_CONFIG"
DEFAULT_FILE = Path("baton.toml")

_file: ContextVar[Path | None] = ContextVar("_file", default=None)


class Settings(BaseSettings):
    """Reads the environment when made; use `load_settings` to read a file as well and to get typed errors."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    model: ModelSettings = Field(default_factory=ModelSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    prefill: PrefillSettings = Field(default_factory=PrefillSettings)
    decode: DecodeSettings = Field(default_factory=DecodeSettings)
    agent: AgentSettings = Field(default_factory=AgentSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @property
    def registry_target(self) -> str:
        """Where workers find the registry."""
        return self.cluster.registry or self.gateway.registry

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = _file.get()
        if file is None:
            return init_settings, env_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)


def load_settings(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """The effective configuration.

    ``flags``: nested, as in {"gateway": {"http": "127.0.0.1:8001"}}. ``file``: by default $BATON_CONFIG, else
    ./baton.toml if there is one. Raises ConfigError with every problem found.
    """
    _refuse_unknown_sections()
    token = _file.set(_config_file(file))
    try:
        return Settings(**(flags or {}))
    except ValidationError as error:
        raise ConfigError(list(map(_problem, error.errors()))) from error
    except (SettingsError, ValueError) as error:  # TOML that does not parse is a ValueError
        raise ConfigError([ConfigProblem(str(_file.get() or "environment"), str(error), "")]) from error
    finally:
        _file.reset(token)


def _refuse_unknown_sections() -> None:
    """Variables of other sections than there are would be passed over. Those without "__" are none of ours, such as the
    BATON_GATEWAY_PORT that Kubernetes sets for a service of that name."""
    written = (name for name in os.environ if name.upper().startswith("BATON_") and "__" in name)
    sections = {name: name.upper().removeprefix("BATON_").partition("__")[0].lower() for name in written}
    problem = f"there is no such section; there are {', '.join(Settings.model_fields)}"
    problems = [
        ConfigProblem(name, problem, os.environ[name])
        for name, section in sections.items()
        if section not in Settings.model_fields
    ]
    if problems:
        raise ConfigError(problems)


def _problem(item: ErrorDetails) -> ConfigProblem:
    unknown = item["type"] == "extra_forbidden"
    said = "there is no such option; `baton config --docs` lists all" if unknown else item["msg"]
    return ConfigProblem(".".join(map(str, item["loc"])), said, repr(item["input"]))


def _config_file(file: Path | None) -> Path | None:
    if file is None and (named := os.environ.get(CONFIG_VARIABLE)):
        file = Path(named)
    if file is None:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    if not file.is_file():
        raise ConfigError([ConfigProblem("config", "there is no such file", str(file))])
    return file


def parse_assignment(text: str) -> dict[str, Any]:
    """ "gateway.http=127.0.0.1:8001" as nested flags; the value stays text, and its section's type reads it."""
    path, equals, value = text.partition("=")
    section, dot, option = path.strip().partition(".")
    if not equals or not dot or not option:
        raise ConfigError([ConfigProblem("--set", "write section.option=value", repr(text))])
    return {section: {option: value.strip()}}


def merge(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Section by section, later layers win; None means not given."""
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, options in layer.items():
            given = {option: value for option, value in options.items() if value is not None}
            if given:
                merged.setdefault(section, {}).update(given)
    return merged
