"""The tokenizer of a GGUF file: the default model against an independent construction, and malformed files."""

from __future__ import annotations

import itertools
import json
import struct
from functools import lru_cache
from pathlib import Path

import pytest
import regex
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_tokenizer import MalformedTokenizer, Tokenizer, TokenizerNotFound, UnsupportedTokenizer, load_tokenizer
from baton_tokenizer.gguf_metadata import read_metadata
from baton_tokenizer.gguf_source import parts_from_metadata
from baton_tokenizer.pretokenizers import FAMILIES
from tokenizer_samples import HARD_STRINGS, default_model

_GPT2_PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class ReferenceTokenizer:
    """Byte-level BPE as the papers describe it, in plain Python, from what the `gguf` library reads.

    Special tokens are cut out first, then every digit stands alone, then GPT-2's pattern, then merges by rank.
    """

    def __init__(self, path: Path) -> None:
        fields = GGUFReader(path).fields
        tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
        types: list[int] = fields["tokenizer.ggml.token_type"].contents()
        merges: list[str] = fields["tokenizer.ggml.merges"].contents()
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        specials = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.specials = regex.compile("(" + "|".join(map(regex.escape, sorted(specials, key=len, reverse=True))) + ")")
        self.special_names = set(specials)
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in printable]
        self.byte_names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.specials.split(text):
            if piece in self.special_names:
                ids.append(self.ids[piece])
                continue
            for section in regex.split(r"(\p{N})", piece):
                for word in _GPT2_PATTERN.findall(section):
                    ids += self._merge([self.byte_names[b] for b in word.encode()])
        return ids

    def knows(self, text: str) -> bool:
        return all(self.byte_names[b] in self.ids for b in text.encode())

    def _merge(self, word: list[str]) -> list[int]:
        # Bytes that only unassigned planes use have no token in this vocabulary; they vanish, as in Hugging Face's.
        parts = [part for part in word if part in self.ids]
        while len(parts) > 1:
            pairs = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(itertools.pairwise(parts))]
            rank, i = min(pairs)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


@lru_cache
def reference() -> ReferenceTokenizer:
    return ReferenceTokenizer(default_model())


@lru_cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(default_model())


@pytest.mark.parametrize("text", HARD_STRINGS, ids=lambda text: ascii(text)[:40])
def test_hard_strings_follow_the_rule(text: str) -> None:
    ids = default_tokenizer().encode(text)
    assert ids == reference().encode(text)
    assert default_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_where_the_plain_gpt2_split_would_join_them() -> None:
    tokenizer = default_tokenizer()
    assert [tokenizer.decode([i]) for i in tokenizer.encode("\n\n1.")] == ["\n\n", "1", "."]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("  12")] == ["  ", "1", "2"]


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_any_text_follows_the_rule_and_comes_back(text: str) -> None:
    ids = default_tokenizer().encode(text)
    assert ids == reference().encode(text)
    if reference().knows(text):
        assert default_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_default_model_essentials() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.encode("") == []


def test_metadata_equals_what_the_gguf_library_reads() -> None:
    fields = GGUFReader(default_model()).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(default_model()) == expected


# --- files that are not what they should be ---------------------------------------------------------------------------


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _file(tmp_path: Path, pairs: bytes, count: int = 1, version: int = 3, magic: bytes = b"GGUF") -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(magic + struct.pack("<IQQ", version, 0, count) + pairs)
    return path


@pytest.mark.parametrize(
    "pairs",
    [
        struct.pack("<Q", 1 << 60) + b"key",
        _string("k") + struct.pack("<I", 99) + b"\0" * 8,
        _string("k") + struct.pack("<IIQ", 9, 4, 1 << 61),
        _string("k") + struct.pack("<IIQ", 9, 8, 1000) + b"\0" * 100,
        _string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10 + b"\0" * 40,
        _string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe",
        b"",
    ],
    ids=["key too long", "unknown type", "array too long", "strings end early", "nesting", "not UTF-8", "missing pair"],
)
def test_a_broken_file_is_a_typed_error(tmp_path: Path, pairs: bytes) -> None:
    with pytest.raises(MalformedTokenizer):
        read_metadata(_file(tmp_path, pairs))


def test_wrong_magic_wrong_version_empty_and_absent(tmp_path: Path) -> None:
    for arguments in ({"magic": b"GGML"}, {"version": 1}, {"version": 0x03000000}):
        with pytest.raises(MalformedTokenizer):
            read_metadata(_file(tmp_path, b"", count=0, **arguments))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(MalformedTokenizer):
        read_metadata(tmp_path / "empty")
    with pytest.raises(TokenizerNotFound):
        load_tokenizer(tmp_path / "absent.gguf")


@settings(max_examples=60)
@given(cut=st.integers(0, 400))
def test_a_truncated_file_is_a_typed_error(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    with default_model().open("rb") as source:
        path.write_bytes(source.read(cut))
    with pytest.raises(MalformedTokenizer):
        read_metadata(path)


# --- families ---------------------------------------------------------------------------------------------------------

_LETTERS = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]


def _metadata(**changes: object) -> dict[str, object]:
    tokens = [*_LETTERS, "12", "123", "Ġ1", "<s>", "</s>", "<think>"]
    base: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": ["Ġ 1", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def _pieces(pre: str, text: str, **changes: object) -> list[str]:
    parts = parts_from_metadata(_metadata(**{"tokenizer.ggml.pre": pre} | changes), "test")  # type: ignore[arg-type]
    return parts.backend.encode(text).tokens


def test_families_split_digits_as_they_should() -> None:
    assert _pieces("gpt-2", " 1234") == ["Ġ1", "2", "3", "4"]
    assert _pieces("smollm", " 1234") == ["Ġ", "1", "2", "3", "4"]
    assert _pieces("qwen2", "1234") == ["1", "2", "3", "4"]
    assert _pieces("llama-bpe", "1234") == ["<s>", "123", "4"]
    assert _pieces("deepseek-v3", "12312") == ["<s>", "123", "12"]


def test_whether_a_prompt_begins_with_a_token_is_the_files_word_first() -> None:
    assert _pieces("llama-bpe", "a", **{"tokenizer.ggml.add_bos_token": False}) == ["a"]
    assert _pieces("gpt-2", "a", **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}) == [
        "<s>",
        "a",
        "</s>",
    ]


@pytest.mark.parametrize("pre", sorted(FAMILIES))
@pytest.mark.parametrize("text", ["a b  c\n\n d", "I'll 中文! \r\n", "<think>x</s>"])
def test_every_family_loses_nothing(pre: str, text: str) -> None:
    tokenizer = Tokenizer(parts_from_metadata(_metadata(**{"tokenizer.ggml.pre": pre}), "test"))  # type: ignore[arg-type]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_turn_ends_are_ends_too() -> None:
    end = len(_metadata()["tokenizer.ggml.tokens"]) - 1  # type: ignore[arg-type]
    parts = parts_from_metadata(_metadata(**{"tokenizer.ggml.eot_token_id": end}), "test")  # type: ignore[arg-type]
    assert parts.eos_token_ids == (end - 1, end)


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="'viking'") as caught:
        _pieces("viking", "a")
    assert caught.value.fields == {"pre": "viking"}
    assert caught.value.reason == "TOKENIZER_UNSUPPORTED"
    with pytest.raises(UnsupportedTokenizer, match="'llama'"):
        _pieces("default", "a", **{"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.merges": ["12"]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.eos_token_id": 1 << 20},
        {"tokenizer.ggml.eos_token_id": "2"},
        {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
    ],
    ids=json.dumps,
)
def test_contradictions_are_typed_errors(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedTokenizer):
        _pieces("gpt-2", "a", **changes)
