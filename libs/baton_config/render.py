"""A configuration as text: TOML that reads back to the same, and the table of all options."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from baton_config.settings import Settings


@dataclass(frozen=True)
class Option:
    section: str
    name: str
    kind: str
    default: str
    description: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        return f"BATON_{self.section}__{self.name}".upper()


def options() -> Iterator[Option]:
    """Every option, in the order of the sections."""
    for section, section_field in Settings.model_fields.items():
        section_type = section_field.annotation
        assert isinstance(section_type, type) and issubclass(section_type, BaseModel)
        for name, field in section_type.model_fields.items():
            default = _shown(field.get_default(call_default_factory=True))
            yield Option(section, name, _kind(field), default, field.description or "")


def to_toml(settings: Settings) -> str:
    """Unset options are left out."""
    lines: list[str] = []
    for section, values in settings.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value.human_readable() if hasattr(value, "human_readable") else str(value)


def _kind(field: FieldInfo) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true, false", Path: "path", ByteSize: "size"}
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return "list" if get_origin(kind) is tuple else names[kind]
