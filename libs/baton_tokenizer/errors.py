"""Typed errors of the tokenizer. Each carries a gRPC code name, a machine-readable reason and fields."""

from __future__ import annotations


class TokenizerError(Exception):
    """Base of every error of this library."""

    status = "INTERNAL"
    reason = "TOKENIZER"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}


class TokenizerNotFound(TokenizerError):
    """The path holds neither a GGUF file nor a Hugging Face directory with a tokenizer.json."""

    status = "FAILED_PRECONDITION"
    reason = "TOKENIZER_NOT_FOUND"


class MalformedTokenizer(TokenizerError):
    """A file was found but its content is broken: truncated, of a wrong type, or contradicting itself."""

    status = "FAILED_PRECONDITION"
    reason = "TOKENIZER_MALFORMED"


class UnsupportedTokenizer(TokenizerError):
    """The file names an algorithm that is not known here; guessing would silently give wrong ids."""

    status = "FAILED_PRECONDITION"
    reason = "TOKENIZER_UNSUPPORTED"


class InvalidText(TokenizerError):
    """Text that is not Unicode: it holds lone surrogates and has no UTF-8 form."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_TEXT"


class InvalidTokenId(TokenizerError):
    """A token id outside the vocabulary."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_TOKEN_ID"


class NoChatTemplate(TokenizerError):
    """The model carries no chat template, so a conversation cannot be rendered."""

    status = "INVALID_ARGUMENT"
    reason = "NO_CHAT_TEMPLATE"


class InvalidChat(TokenizerError):
    """The chat template refused the messages, for instance because roles do not alternate."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_CHAT"


class InvalidStop(TokenizerError):
    """A stop string that could never end anything, or would end everything: it is empty."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_STOP"
