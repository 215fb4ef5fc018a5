"""Text from a stream of token ids, increment by increment.

The law of every detokenizer here: the increments and the flush, concatenated, are exactly what decoding all the ids at
once gives, and no increment ends inside a character.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend


class IncrementalDetokenizer(Protocol):
    """State of one stream."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is complete by now."""
        ...

    def flush(self) -> str:
        """The text of bytes that never became a whole character; nothing may be pushed afterwards."""
        ...


def _byte_characters() -> dict[str, int]:
    """Character -> byte, of the alphabet in which byte-level BPE writes its tokens.

    Printable Latin-1 stands for itself, the other bytes follow from U+0100 on, as in GPT-2's bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTE_CHARACTERS = _byte_characters()
_REPLACEMENT = "\ufffd"


class TokenBytes:
    """What each token contributes to the text, shared by all streams of one tokenizer.

    byte_level: every token is a string of bytes, whatever its neighbours, so a stream needs no second look.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._cache: dict[int, bytes] = {}

    def text_token(self, token_id: int) -> str | None:
        """The vocabulary's entry, None for an id outside of it (which decoding ignores)."""
        return self._backend.id_to_token(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids of which none is to be skipped."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a `<0xE2>` token of a byte-fallback vocabulary stands for."""
        token = self.text_token(token_id)
        if not self.byte_fallback or token is None or len(token) != 6 or token[:3] != "<0x" or token[5] != ">":
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes as they stand inside a text; a special token's are its name's."""
        cached = self._cache.get(token_id)
        if cached is None:
            cached = self._cache[token_id] = self._bytes(token_id)
        return cached

    def _bytes(self, token_id: int) -> bytes:
        token = self.text_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            values = [_BYTE_CHARACTERS.get(character) for character in token]
            # A token added as plain text holds characters outside the alphabet and is taken literally as a whole.
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        byte = self.fallback_byte(token_id)
        if byte is not None:
            return bytes([byte])
        # Between two others, so that rules for the first token of a text (a leading space dropped) don't apply.
        anchor = self.decode([token_id])
        return self.decode([token_id, token_id])[len(anchor) :].encode()


def _decoder_kinds(backend: Backend) -> list[str]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


class ByteLevelDetokenizer:
    """For byte-level vocabularies: the tokens' bytes through an incremental UTF-8 decoder. Constant time a token."""

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes(token) for token in ids if token not in self._skipped))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes a short window without and with the new tokens, and shows the difference.

    The window begins with the tokens shown last, because a decoder may treat the first token of a text in its own way
    (SentencePiece drops its leading space). A run of byte-fallback tokens is decoded as one: a single bad byte in it
    turns every byte of the run into a replacement character, so nothing of it is shown before it ends.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push(token) for token in ids if token not in self._skipped)

    def _push(self, token_id: int) -> str:
        if self._bytes.text_token(token_id) is None:
            return ""
        if self._bytes.byte_fallback:
            if self._bytes.fallback_byte(token_id) is not None:
                self._pending.append(token_id)
                return ""
            # This token ends the run before it.
            run = self._advance(lambda _text: True)
            self._pending.append(token_id)
            return run + self._advance(lambda _text: True)
        self._pending.append(token_id)
        return self._advance(lambda text: not text.endswith(_REPLACEMENT))

    def _advance(self, complete: Callable[[str], bool]) -> str:
        if not self._pending:
            return ""
        before = self._bytes.decode(self._shown) if self._shown else ""
        text = self._bytes.decode(self._shown + self._pending)[len(before) :]
        if not complete(text):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        return self._advance(lambda _text: True)
