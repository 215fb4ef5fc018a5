"""Tokenizer, chat template, incremental detokenisation and stop strings. No torch."""

from baton_tokenizer.chat import Message
from baton_tokenizer.detokenizer import IncrementalDetokenizer
from baton_tokenizer.errors import (
    InvalidChat,
    InvalidStop,
    InvalidText,
    InvalidTokenId,
    MalformedTokenizer,
    NoChatTemplate,
    TokenizerError,
    TokenizerNotFound,
    UnsupportedTokenizer,
)
from baton_tokenizer.stop import StopChecker, StopStep
from baton_tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "InvalidChat",
    "InvalidStop",
    "InvalidText",
    "InvalidTokenId",
    "MalformedTokenizer",
    "Message",
    "NoChatTemplate",
    "StopChecker",
    "StopStep",
    "Tokenizer",
    "TokenizerError",
    "TokenizerNotFound",
    "UnsupportedTokenizer",
    "load_tokenizer",
]
