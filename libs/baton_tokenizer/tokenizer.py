"""The tokenizer of one model: text to ids, ids to text, conversations to ids."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend

from baton_tokenizer.chat import ChatTemplate, Message
from baton_tokenizer.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer, TokenBytes, WindowDetokenizer
from baton_tokenizer.errors import InvalidChat, InvalidText, InvalidTokenId, NoChatTemplate, TokenizerNotFound

# Planes 15 and 16 are private use: no text that means anything to a reader holds them.
_STAND_INS = range(0xF0000, 0x10FFFE)


@dataclass(frozen=True)
class Parts:
    """What a tokenizer is made of, wherever it was read from.

    eos_token_ids: each of these ends a generation. special_tokens: `bos_token`, `eos_token`, ... -> text.
    """

    backend: Backend
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None


class Tokenizer:
    """Encodes and decodes for one model. Safe for use from several threads.

    vocab_size: number of ids, added tokens included. eos_token_ids: each of these ends a generation.
    """

    def __init__(self, parts: Parts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_ids = parts.eos_token_ids
        self.special_tokens = parts.special_tokens
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._token_bytes = TokenBytes(self._backend)
        self._template = ChatTemplate(parts.chat_template, parts.special_tokens) if parts.chat_template else None
        added = self._backend.get_added_tokens_decoder()
        self._specials = {token.content: token for token in added.values() if token.special}
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._literal: Backend | None = None
        self._literal_lock = threading.Lock()

    # --- text ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. The names of special tokens in it become those tokens: who writes a raw prompt may use them.

        add_special_tokens: put the begin-of-sequence token in front where the model wants one.
        Raises InvalidText for lone surrogates.
        """
        _require_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Raises InvalidTokenId for one outside the vocabulary."""
        for token_id in ids:
            self._require_id(token_id)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh stream; its increments add up to `decode` of all its ids."""
        if self._token_bytes.byte_level:
            return ByteLevelDetokenizer(self._token_bytes, skip_special_tokens)
        return WindowDetokenizer(self._token_bytes, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token inside a text, for log-probabilities. Raises InvalidTokenId."""
        self._require_id(token_id)
        return self._token_bytes(token_id)

    # --- conversations ------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text, as Hugging Face transformers renders it.

        To get ids use `encode_chat`: in this text a special token's name that a user wrote looks like the real one.
        Raises NoChatTemplate, InvalidChat.
        """
        if self._template is None:
            raise NoChatTemplate("this model has no chat template; send a plain prompt instead")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the rendered conversation.

        Only the template may speak in special tokens. Where a message's role or content spells one (`<|im_end|>`), it
        is encoded as the ordinary characters it is written with, so no message can end its turn early or pose as
        another role. transformers and the servers built on it let that happen; apart from such messages the ids are
        the same. Raises NoChatTemplate, InvalidChat, InvalidText.
        """
        for message in messages:
            for value in message.values():
                _require_unicode(value)
        spelled = sorted({name for message in messages for value in message.values() for name in self._found(value)})
        if not spelled:
            return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)
        if not self._token_bytes.byte_level:
            # Other vocabularies treat the first word of a text in their own way, so pieces cannot be encoded apart.
            raise InvalidChat(
                f"a message spells the special token {spelled[0]!r}, which this model cannot take as plain text",
                token=spelled[0],
            )
        stand_ins = self._stand_ins(spelled, messages)
        disguised = [
            {key: self._special_pattern.sub(lambda m: stand_ins[m[0]], value) for key, value in message.items()}
            for message in messages
        ]
        return self._encode_disguised(self.apply_chat_template(disguised, add_generation_prompt), stand_ins)

    def _found(self, text: str) -> Iterable[str]:
        return (match[0] for match in self._special_pattern.finditer(text))

    @staticmethod
    def _stand_ins(names: Sequence[str], messages: Sequence[Message]) -> dict[str, str]:
        taken = {character for message in messages for value in message.values() for character in value}
        free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        pairs = dict(zip(names, free, strict=False))
        if len(pairs) < len(names):
            raise InvalidChat("the messages hold nearly every private-use character; remove some")
        return pairs

    def _encode_disguised(self, text: str, stand_ins: dict[str, str]) -> list[int]:
        """Encodes a rendering in which `stand_ins` are the special tokens' names that messages spelled."""
        names = str.maketrans({stand_in: name for name, stand_in in stand_ins.items()})
        literal = self._literal_backend()
        ids: list[int] = []
        position, after = 0, None
        while position <= len(text):
            match = self._special_pattern.search(text, position)
            piece = text[position : match.start() if match else len(text)]
            before = self._specials[match[0]] if match else None
            if after is not None and after.rstrip:
                piece = piece.lstrip()
            if before is not None and before.lstrip:
                piece = piece.rstrip()
            ids += literal.encode(piece.translate(names), add_special_tokens=False).ids
            if match is None or before is None:
                break
            ids.append(self._special_ids[match[0]])
            position, after = match.end(), before
        return ids

    def _literal_backend(self) -> Backend:
        """A copy that reads special tokens' names as ordinary text. Made when first needed: it doubles the memory."""
        with self._literal_lock:
            if self._literal is None:
                self._literal = Backend.from_str(self._backend.to_str())
                self._literal.encode_special_tokens = True
            return self._literal

    def _require_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidTokenId(
                f"token id {token_id} is outside the vocabulary; valid are 0 to {self.vocab_size - 1}",
                token_id=token_id,
                vocab_size=self.vocab_size,
            )


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; "
            "text must be valid Unicode",
            position=error.start,
        ) from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model at `path`: a GGUF file, or a Hugging Face directory with a tokenizer.json.

    Raises TokenizerNotFound, MalformedTokenizer, UnsupportedTokenizer.
    """
    from baton_tokenizer import gguf_source, huggingface_source

    path = Path(path)
    if path.is_dir():
        return Tokenizer(huggingface_source.read_parts(path))
    if path.is_file():
        return Tokenizer(gguf_source.read_parts(path))
    raise TokenizerNotFound(f"no model at {path}: expected a GGUF file or a Hugging Face directory", path=path)
