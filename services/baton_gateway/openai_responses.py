"""OpenAI's response objects. Pure: increments in, JSON-like dictionaries out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from baton.v1 import common_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton_gateway.output import Increment
from baton_tokenizer import Tokenizer

Json = dict[str, Any]

_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass
class Choice:
    """Everything generated for one prompt. offset: where its next token begins in the text, in characters."""

    index: int
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    timeline: common_pb2.Timeline = field(default_factory=common_pb2.Timeline)
    offset: int = 0

    def add(self, increment: Increment) -> None:
        self.text += increment.text
        self.logprobs += increment.logprobs
        if increment.finished:
            self.finish_reason = _FINISH[increment.finish_reason]
            self.usage = increment.usage
            self.timeline = increment.timeline


def usage(choices: Sequence[Choice]) -> Json:
    prompt = sum(choice.usage.prompt_tokens for choice in choices)
    completion = sum(choice.usage.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.usage.cached_tokens for choice in choices)},
    }


class Form(ABC):
    """One of the two kinds of responses, for one HTTP request.

    include_usage: the stream ends with a chunk that carries the usage. with_timeline: say where the time went.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, request_id: str, model: str, include_usage: bool, with_timeline: bool) -> None:
        self._id = f"{self.prefix}-{request_id.removeprefix('req-')}"
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        self._with_timeline = with_timeline

    @abstractmethod
    def _choice(self, choice: Choice) -> Json:
        """A whole choice."""

    @abstractmethod
    def _delta(self, choice: Choice, increment: Increment) -> Json:
        """What an increment adds to a choice."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The response to a request without streaming."""
        body = self._head(self.kind, [self._choice(choice) for choice in choices])
        body["usage"] = usage(choices)
        if self._with_timeline:
            timelines = [timeline_json(choice.timeline) for choice in choices]
            body["baton_timeline"] = timelines[0] if len(timelines) == 1 else timelines
        return body

    def first_chunk(self, index: int) -> Json | None:
        """What opens a choice's stream, if anything."""
        return None

    def chunk(self, choice: Choice, increment: Increment) -> Json | None:
        """What one increment adds; None while its text is held back."""
        if not (increment.text or increment.logprobs or increment.finished):
            return None
        body = self._chunk(self._delta(choice, increment))
        if self._with_timeline and increment.finished:
            body["baton_timeline"] = timeline_json(increment.timeline)
        return body

    def last_chunk(self, choices: Sequence[Choice]) -> Json | None:
        """The usage, if it was asked for."""
        if not self._include_usage:
            return None
        return self._head(self.chunk_kind, []) | {"usage": usage(choices)}

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choice: Json) -> Json:
        body = self._head(self.chunk_kind, [choice])
        if self._include_usage:
            body["usage"] = None
        return body


class CompletionForm(Form):
    """logprobs: how many of the best tokens to list; None: no log-probabilities. echoes: a text to put before each
    choice, or none."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        include_usage: bool,
        with_timeline: bool,
        tokenizer: Tokenizer,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(request_id, model, include_usage, with_timeline)
        self._tokenizer = tokenizer
        self._echoes = echoes

    def first_chunk(self, index: int) -> Json | None:
        if not self._echoes:
            return None
        return self._chunk({"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None})

    def _choice(self, choice: Choice) -> Json:
        text = (self._echoes[choice.index] if self._echoes else "") + choice.text
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, choice: Choice, increment: Increment) -> Json:
        return {
            "index": choice.index,
            "text": increment.text,
            "logprobs": self._logprobs(choice, increment.logprobs),
            "finish_reason": _FINISH.get(increment.finish_reason),
        }

    def _logprobs(self, choice: Choice, positions: Sequence[common_pb2.PositionLogprobs]) -> Json | None:
        if not positions:
            return None
        result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position in positions:
            name = self._name(position.sampled.token_id)
            result["tokens"].append(name)
            result["token_logprobs"].append(position.sampled.logprob)
            best = {self._name(top.token_id): top.logprob for top in position.top}
            result["top_logprobs"].append(best | {name: position.sampled.logprob})
            result["text_offset"].append(choice.offset)
            choice.offset += len(_raw(self._tokenizer, position.sampled.token_id).decode(errors="ignore"))
        return result

    def _name(self, token_id: int) -> str:
        """The token's text, or "bytes:…" for a part of a character, as OpenAI writes it."""
        raw = _raw(self._tokenizer, token_id)
        try:
            return raw.decode() or _nameless(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatForm(Form):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, request_id: str, model: str, include_usage: bool, with_timeline: bool, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request_id, model, include_usage, with_timeline)
        self._tokenizer = tokenizer

    def first_chunk(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, choice: Choice, increment: Increment) -> Json:
        return {
            "index": choice.index,
            "delta": {"content": increment.text} if increment.text else {},
            "logprobs": self._logprobs(increment.logprobs),
            "finish_reason": _FINISH.get(increment.finish_reason),
        }

    def _logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Json | None:
        if not positions:
            return None
        content = [
            self._token(position.sampled) | {"top_logprobs": [self._token(top) for top in position.top]}
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: common_pb2.TokenLogprob) -> Json:
        raw = _raw(self._tokenizer, token.token_id)
        name = raw.decode(errors="replace") or _nameless(token.token_id)
        return {"token": name, "logprob": token.logprob, "bytes": list(raw)}


def _raw(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Nothing for an id that only the model has: many embeddings are padded beyond the tokenizer's vocabulary."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def _nameless(token_id: int) -> str:
    """As vLLM writes tokens by their ids."""
    return f"token_id:{token_id}"


def timeline_json(message: Message) -> Json:
    """A Timeline under its proto names, with every field and with numbers as numbers (proto's own JSON writes 64-bit
    integers as strings)."""
    result: Json = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            value = [timeline_json(item) for item in value] if descriptor.is_repeated else timeline_json(value)
        result[descriptor.name] = value
    return result
