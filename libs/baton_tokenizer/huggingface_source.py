"""The tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from baton_tokenizer.errors import MalformedTokenizer, TokenizerNotFound
from baton_tokenizer.tokenizer import Parts

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_parts(directory: Path) -> Parts:
    """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

    Only the first is required. Raises TokenizerNotFound, MalformedTokenizer.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise TokenizerNotFound(
            f"{directory} has no tokenizer.json; convert the model's tokenizer to that format first", path=file
        )
    try:
        backend = Backend.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise MalformedTokenizer(f"{file} is not a tokenizer: {error}", path=file) from error
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    return Parts(
        backend=backend,
        eos_token_ids=_eos_token_ids(directory, backend, special_tokens.get("eos_token")),
        special_tokens=special_tokens,
        chat_template=_chat_template(directory, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MalformedTokenizer(f"{file} is not JSON: {error}", path=file) from error
    if not isinstance(value, dict):
        raise MalformedTokenizer(f"{file} holds a {type(value).__name__}; expected an object", path=file)
    return value


def _token_text(token: Any) -> str | None:
    """A special token is written as a string, or as an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _eos_token_ids(directory: Path, backend: Backend, eos_token: str | None) -> tuple[int, ...]:
    """The generation config's ids, or else the model config's, and the tokenizer's own end-of-sequence token."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token_id, int) for token_id in ids):
                raise MalformedTokenizer(
                    f"{directory / name}: eos_token_id is {value!r}; expected an id or a list of ids"
                )
            break
    own = backend.token_to_id(eos_token) if eos_token is not None else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several named templates; the one for plain conversations is called "default".
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise MalformedTokenizer(f"{directory}: chat_template is a {type(template).__name__}; expected a string or a list")
