"""Typed reads from a checkpoint's metadata, which is a plain mapping of names to JSON-like values."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import InvalidConfig

T = TypeVar("T", int, float, bool, str)

_REQUIRED: Any = object()

# No size, count or token id needs more than 32 bits; what asks for more is a slip of the pen.
MOST = (1 << 31) - 1


class Settings:
    """A mapping that answers with the right type or an `InvalidConfig` naming the key. JSON null counts as absent, but
    for a switch, which it turns off, as transformers does."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(self._prefix + key) is not None

    def get(self, key: str, kind: type[T], default: T = _REQUIRED) -> T:
        """The value of `key` as `kind`. An integer is accepted where a float is asked for; a float is always finite."""
        value = self.values.get(self._prefix + key)
        if kind is bool and value is None and self._prefix + key in self.values:
            return kind(False)
        if value is None:
            if default is _REQUIRED:
                raise InvalidConfig(
                    f"{self.path}: setting {self._prefix + key!r} is missing; it must be a {kind.__name__}",
                    setting=self._prefix + key,
                )
            return default
        if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            return kind(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise self.invalid(key, f"it must be a {'finite ' if kind is float else ''}{kind.__name__}")
        return value

    def integer(self, key: str, default: int = _REQUIRED, *, least: int, most: int = MOST) -> int:
        """The value of `key` as an integer in [`least`, `most`]."""
        value = self.get(key, int, default)
        if value < least:
            raise self.invalid(key, f"it must be at least {least}")
        if value > most:
            raise self.invalid(key, f"it must be at most {most}")
        return value

    def positive(self, key: str, default: int = _REQUIRED, *, most: int = MOST) -> int:
        """The value of `key` as an integer in [1, `most`]."""
        return self.integer(key, default, least=1, most=most)

    def above(self, key: str, bound: float, default: float = _REQUIRED) -> float:
        """The value of `key` as a finite float greater than `bound`."""
        value = self.get(key, float, default)
        if value <= bound:
            raise self.invalid(key, f"it must be more than {bound:g}")
        return value

    def optional(self, key: str, default: int, *, least: int = 1) -> int | None:
        """As `integer`, but an explicit null is None: here null is not the same as absent."""
        if self._prefix + key in self.values and self.values[self._prefix + key] is None:
            return None
        return self.integer(key, default, least=least)

    def section(self, key: str) -> Settings | None:
        """A nested mapping, or None where there is none."""
        value = self.values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.invalid(key, "it must be a mapping")
        return Settings(value, self.path)

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or a list of integers, as a tuple; empty where absent."""
        value = self.values.get(self._prefix + key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in values):
            raise self.invalid(key, "it must be an integer or a list of integers")
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, as a tuple; empty where absent."""
        value = self.values.get(self._prefix + key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(key, "it must be a list of strings")
        return tuple(value)

    def invalid(self, key: str, rule: str) -> InvalidConfig:
        """The error for a value that breaks `rule`."""
        value = self.values.get(self._prefix + key)
        return InvalidConfig(
            f"{self.path}: setting {self._prefix + key!r} is {value!r}; {rule}", setting=self._prefix + key, value=value
        )
