"""Chat templates, rendered as Hugging Face transformers renders them.

A template comes with the model and is not trusted: it runs in Jinja's sandbox and cannot change its inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_tokenizer.errors import InvalidChat, MalformedTokenizer

Message = Mapping[str, str]
"""`role` and `content`."""


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template.

    source: the template's text. special_tokens: `bos_token`, `eos_token`, ... -> text, visible to the template.
    Raises MalformedTokenizer if the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise MalformedTokenizer(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The prompt's text. Raises InvalidChat if the template refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidChat(f"the model's chat template refuses these messages: {error}") from error
