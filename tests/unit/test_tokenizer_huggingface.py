"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from baton_tokenizer import MalformedTokenizer, TokenizerNotFound, load_tokenizer
from baton_tokenizer.gguf_source import read_parts
from tokenizer_samples import HARD_STRINGS, byte_level_backend, default_model


def _directory(path: Path, **files: object) -> Path:
    byte_level_backend().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_the_same_vocabulary_gives_the_same_ids_from_both_formats(tmp_path: Path) -> None:
    read_parts(default_model()).backend.save(str(tmp_path / "tokenizer.json"))
    ours, gguf = load_tokenizer(tmp_path), load_tokenizer(default_model())
    for text in HARD_STRINGS:
        assert ours.encode(text) == gguf.encode(text)


def test_end_of_sequence_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    own = byte_level_backend().token_to_id("<|end|>")
    directory = _directory(tmp_path, tokenizer_config__json=config, config__json={"eos_token_id": 5})
    assert load_tokenizer(directory).eos_token_ids == (5, own)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(directory).eos_token_ids == (7, 8, own)
    assert load_tokenizer(directory).special_tokens == {"eos_token": "<|end|>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "B"}]}}, "B"),
        ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": "C"}, "C"),
    ],
)
def test_where_the_chat_template_is(tmp_path: Path, files: dict[str, object], expected: str) -> None:
    assert load_tokenizer(_directory(tmp_path, **files)).apply_chat_template([]) == expected


def test_no_template_anywhere(tmp_path: Path) -> None:
    assert not load_tokenizer(_directory(tmp_path)).has_chat_template


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("zyxwvutsrq")) == "zyxwvutsrq"


def test_the_begin_token_is_for_plain_prompts_not_for_rendered_chats(tmp_path: Path) -> None:
    backend = byte_level_backend()
    end = backend.token_to_id("<|end|>")
    backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<|end|>{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello") == tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode("hello")[1:]


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MalformedTokenizer, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    directory = _directory(tmp_path, config__json="not json")
    with pytest.raises(MalformedTokenizer, match=r"config\.json"):
        load_tokenizer(directory)
    (directory / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(MalformedTokenizer, match="eos_token_id"):
        load_tokenizer(directory)
