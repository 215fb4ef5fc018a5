"""Detokenising and stopping in increments gives what doing it at once gives."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from baton_tokenizer import InvalidStop, InvalidTokenId, StopChecker, Tokenizer, load_tokenizer
from baton_tokenizer.tokenizer import Parts
from tokenizer_samples import HARD_STRINGS, byte_fallback_backend, byte_level_backend, default_model


@lru_cache
def tokenizers() -> dict[str, Tokenizer]:
    word_pieces = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3, ".": 4}, unk_token="[UNK]"))
    word_pieces.decoder = decoders.WordPiece()
    backends = {
        "byte level": byte_level_backend(),
        "byte fallback": byte_fallback_backend(),
        "word pieces": word_pieces,
    }
    small = {name: Tokenizer(Parts(backend, (), {}, None)) for name, backend in backends.items()}
    return small | {"default model": load_tokenizer(default_model())}


_NAMES = ["byte level", "byte fallback", "word pieces", "default model"]


@pytest.mark.parametrize("name", _NAMES)
@settings(max_examples=200)
@given(data=st.data())
def test_increments_and_flush_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers()[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces, position = [], 0
    while position < len(ids):
        step = data.draw(st.integers(1, 5))
        pieces.append(stream.push(ids[position : position + step]))
        position += step
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "default model"])
@pytest.mark.parametrize("text", HARD_STRINGS, ids=lambda text: ascii(text)[:40])
def test_no_increment_ends_inside_a_character(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer(skip_special_tokens=False)
    shown = ""
    for token in ids:
        shown += stream.push([token])
        assert text.startswith(shown)
    assert shown + stream.flush() == text == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_of_many_tokens_comes_out_whole() -> None:
    tokenizer = tokenizers()["byte level"]
    ids = tokenizer.encode("👍é")
    assert len(ids) == 6
    stream = tokenizer.detokenizer()
    assert [stream.push([token]) for token in ids] == ["", "", "", "👍", "", "é"]


def test_bytes_that_never_become_a_character_are_flushed_as_replacement() -> None:
    tokenizer = tokenizers()["byte level"]
    stream = tokenizer.detokenizer()
    assert stream.push(tokenizer.encode("👍")[:2]) == ""
    assert stream.flush() == "\ufffd"


def test_one_bad_byte_spoils_its_whole_run_of_byte_tokens() -> None:
    tokenizer = tokenizers()["byte fallback"]
    run = [tokenizer.encode("☃")[i] for i in (-3, -2, -1)]
    stream = tokenizer.detokenizer()
    assert stream.push([*run, run[0]]) == ""
    assert stream.flush() == "\ufffd" * 4 == tokenizer.decode([*run, run[0]])


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "default model"])
def test_token_bytes_add_up_to_the_text(name: str) -> None:
    tokenizer = tokenizers()[name]
    text = "hello wörld 日本 👍"
    joined = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False))
    # SentencePiece's leading space belongs to the first token and is dropped only from a whole text.
    assert joined.decode().removeprefix(" ") == text


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    tokenizer = tokenizers()["byte level"]
    for call in (lambda: tokenizer.decode([tokenizer.vocab_size]), lambda: tokenizer.token_bytes(-1)):
        with pytest.raises(InvalidTokenId):
            call()


# --- stop strings -----------------------------------------------------------------------------------------------------


def _run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown = ""
    for piece in pieces:
        step = checker.push(piece)
        shown += step.text
        if step.stopped:
            assert checker.flush() == ""
            return shown, True
    return shown + checker.flush(), False


def _reference(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


_TEXT = st.text(alphabet="ab\n👍é", max_size=24)


@settings(max_examples=500)
@given(
    stops=st.lists(st.text(alphabet="ab\n👍é", min_size=1, max_size=5), max_size=4), pieces=st.lists(_TEXT, max_size=8)
)
def test_the_cut_depends_on_the_text_not_on_the_increments(stops: list[str], pieces: list[str]) -> None:
    assert _run(stops, pieces) == _reference(stops, "".join(pieces))
    assert _run(stops, list("".join(pieces))) == _reference(stops, "".join(pieces))


@settings(max_examples=300)
@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), text=st.text("abc"))
def test_nothing_is_held_without_need(stops: list[str], text: str) -> None:
    checker = StopChecker(stops)
    seen = shown = ""
    for character in text:
        step = checker.push(character)
        seen += character
        shown += step.text
        if step.stopped:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_that_may_become_a_stop_is_held_and_then_shown() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("Hi\n").text == "Hi"
    assert checker.push("\nUs").text == ""
    assert checker.push("a").text == "\n\nUsa"
    assert checker.push("\n\nUser: x").text == ""
    assert checker.push("more").stopped


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidStop):
        StopChecker(["a", ""])
