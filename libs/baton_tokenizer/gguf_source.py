"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend

from baton_tokenizer.errors import MalformedTokenizer, UnsupportedTokenizer
from baton_tokenizer.gguf_metadata import MetadataValue, read_metadata
from baton_tokenizer.pretokenizers import FAMILIES, Family
from baton_tokenizer.tokenizer import Parts

_BYTE_LEVEL_BPE = "gpt2"
_CONTROL, _USER_DEFINED = 3, 4
# End of sequence, of turn, of message: a generation ends at each.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_T = TypeVar("_T")


def read_parts(path: Path) -> Parts:
    """Reads the metadata only. Raises MalformedTokenizer, UnsupportedTokenizer."""
    return parts_from_metadata(read_metadata(path), str(path))


def parts_from_metadata(metadata: dict[str, MetadataValue], where: str) -> Parts:
    """Builds the tokenizer that the `tokenizer.*` keys describe; `where` names the file in errors."""
    fields = _Fields(metadata, where)
    kind = fields.required("tokenizer.ggml.model", str)
    if kind != _BYTE_LEVEL_BPE:
        raise UnsupportedTokenizer(
            f"{where}: tokenizer.ggml.model is {kind!r}; known is {_BYTE_LEVEL_BPE!r} (byte-level BPE). "
            "Use the model's Hugging Face directory with its tokenizer.json instead",
            model=kind,
        )
    pre = fields.required("tokenizer.ggml.pre", str)
    family = FAMILIES.get(pre)
    if family is None:
        raise UnsupportedTokenizer(
            f"{where}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(sorted(FAMILIES))}. A guess would give "
            "wrong ids; use the model's Hugging Face directory with its tokenizer.json instead",
            pre=pre,
        )
    tokens = fields.strings("tokenizer.ggml.tokens")
    backend = _backend(fields, tokens, family)
    special_tokens: dict[str, str] = {}
    for name, key in _NAMED_TOKENS.items():
        token_id = fields.token_id(f"tokenizer.ggml.{key}", len(tokens))
        if token_id is not None:
            special_tokens[name] = tokens[token_id]
    _add_sequence_tokens(backend, fields, family, special_tokens)
    ends = [fields.token_id(f"tokenizer.ggml.{key}", len(tokens)) for key in _END_KEYS]
    return Parts(
        backend=backend,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_tokens=special_tokens,
        chat_template=fields.optional("tokenizer.chat_template", str),
    )


def _backend(fields: _Fields, tokens: list[str], family: Family) -> Backend:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise MalformedTokenizer(
            f"{fields.where}: {len(tokens) - len(vocabulary)} tokens occur twice in the vocabulary"
        )
    merges: list[tuple[str, str]] = []
    for merge in fields.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise MalformedTokenizer(f"{fields.where}: merge {merge!r} is not two tokens with a space between")
        merges.append((left, right))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.ignore_merges))
    if family.normalizer is not None:
        backend.normalizer = family.normalizer()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    types = fields.required("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise MalformedTokenizer(f"{fields.where}: {len(types)} token types for {len(tokens)} tokens")
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _USER_DEFINED
        ]
    )
    return backend


def _add_sequence_tokens(backend: Backend, fields: _Fields, family: Family, special_tokens: dict[str, str]) -> None:
    adds_bos = fields.optional("tokenizer.ggml.add_bos_token", bool)
    wanted = {
        "bos_token": family.adds_bos if adds_bos is None else adds_bos,
        "eos_token": bool(fields.optional("tokenizer.ggml.add_eos_token", bool)),
    }
    used = {}
    for name, on in wanted.items():
        if on and name not in special_tokens:
            raise MalformedTokenizer(f"{fields.where}: prompts need a {name}, but the file names none")
        if on:
            used[name] = special_tokens[name]
    if used:
        front = [used["bos_token"]] if "bos_token" in used else []
        end = [used["eos_token"]] if "eos_token" in used else []
        backend.post_processor = processors.TemplateProcessing(
            single=[*front, "$A", *end],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*front, *end}],
        )


class _Fields:
    """Typed access to metadata."""

    def __init__(self, metadata: dict[str, MetadataValue], where: str) -> None:
        self._metadata = metadata
        self.where = where

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        value = self._metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise MalformedTokenizer(f"{self.where}: {key} is a {type(value).__name__}; expected {kind.__name__}", key=key)

    def required(self, key: str, kind: type[_T]) -> _T:
        value = self.optional(key, kind)
        if value is None:
            raise MalformedTokenizer(f"{self.where} has no {key}", key=key)
        return value

    def strings(self, key: str) -> list[str]:
        values = self.required(key, list)
        if not all(isinstance(value, str) for value in values):
            raise MalformedTokenizer(f"{self.where}: {key} holds values that are not strings", key=key)
        return values

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.optional(key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise MalformedTokenizer(f"{self.where}: {key} is {value}; the vocabulary has {vocab_size} tokens", key=key)
        return value
