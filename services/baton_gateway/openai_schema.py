"""What OpenAI's API takes, and how much of it is served here: every parameter is honoured, known to be harmless, or
refused by name."""

from __future__ import annotations

from typing import Any

from baton.v1 import common_pb2
from pydantic import BaseModel, ConfigDict

from baton_gateway.errors import InvalidRequest, UnsupportedParameter
from baton_gateway.requests import MAX_LOGPROBS

# One HTTP request may ask for this many completions at once, one for each prompt.
MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16

# Parameters that are not served, with the values under which leaving them out changes nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
# For the caller's own book-keeping; they never change an answer.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UINT32 = 1 << 32


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    # Padding against traffic analysis; harmless to leave out.
    include_obfuscation: bool | None = None


class _Request(BaseModel):
    """What both kinds of requests share.

    Beyond OpenAI's: top_k, ignore_eos, stop_token_ids and cache_salt as vLLM has them; timeline: add `baton_timeline`,
    where the time went, to the response or the last chunk.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeline: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check_supported(self) -> None:
        """Raises UnsupportedParameter for what would change the answer but is not served, InvalidRequest otherwise."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                raise InvalidRequest(f"unrecognized request argument: {name}", name)
            if value not in _NEUTRAL[name]:
                raise UnsupportedParameter(_refusal(name, value), name)
        if self.n not in (None, 1):
            raise UnsupportedParameter(f"n is {self.n}; only n=1 is supported, send the request several times", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")

    def sampling(self, max_tokens: int, logprobs: int | None) -> common_pb2.SamplingParams:
        """max_tokens 0: the default. Raises InvalidRequest for what the contract cannot express."""
        params = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=bool(self.ignore_eos))
        if self.temperature is not None:
            params.temperature = self.temperature
        if self.top_p is not None:
            params.top_p = self.top_p
        # vLLM and others write -1 for "all".
        if self.top_k is not None and self.top_k != -1:
            params.top_k = _within("top_k", self.top_k, 0, _UINT32 - 1)
        if self.seed is not None:
            params.seed = _within("seed", self.seed, -(1 << 63), (1 << 64) - 1) % (1 << 64)
        if self.stop_token_ids:
            params.stop_token_ids.extend(_within("stop_token_ids", i, 0, _UINT32 - 1) for i in self.stop_token_ids)
        if logprobs is not None:
            params.logprobs = logprobs
        return params


class CompletionRequest(_Request):
    # A string, a list of strings, a list of token ids, or a list of such lists: see `prompts`.
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Raises InvalidRequest."""
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise InvalidRequest("prompt must be a string, a list of strings, token ids, or a list of those", "prompt")
        if _is_token_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
        raise InvalidRequest("prompt mixes types; it must hold only strings, or only lists of token ids", "prompt")

    def completion_sampling(self) -> common_pb2.SamplingParams:
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
            if self.echo:
                raise UnsupportedParameter("logprobs of an echoed prompt are not supported", "echo")
        tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(_within("max_tokens", tokens, 1, _UINT32 - 1), self.logprobs)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: Any = None


class ChatRequest(_Request):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def conversation(self) -> list[dict[str, str]]:
        """Roles and texts for the chat template. Raises InvalidRequest and UnsupportedParameter."""
        if not self.messages:
            raise InvalidRequest("messages is empty; it must have at least one message", "messages")
        return [_message(index, message) for index, message in enumerate(self.messages)]

    def chat_sampling(self) -> common_pb2.SamplingParams:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        top = _within("top_logprobs", self.top_logprobs or 0, 0, MAX_LOGPROBS)
        limit = 0 if tokens is None else _within(name, tokens, 1, _UINT32 - 1)
        return self.sampling(limit, top if self.logprobs else None)


def _message(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    extra = {name for name, value in (message.model_extra or {}).items() if value} - {"name"}
    if message.role in ("tool", "function") or extra & {"tool_calls", "tool_call_id", "function_call"}:
        raise UnsupportedParameter(f"{where} is part of a tool call; tools are not supported", f"{where}.role")
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role is {message.role!r}; it must be system, developer, user or assistant", f"{where}.role"
        )
    return {"role": role, "content": _text(where, message.content)}


def _text(where: str, content: object) -> str:
    """Several text parts become one text, a line each, as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UnsupportedParameter(
                f"{where}.content holds a part of type {kind!r}; only text is supported", f"{where}.content"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.content holds a text part without a text", f"{where}.content")
        texts.append(text)
    return "\n".join(texts)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _within(name: str, value: int, least: int, most: int) -> int:
    if least <= value <= most:
        return value
    right = f"at least {least}" if most >= _UINT32 - 1 and value < least else f"from {least} to {most}"
    raise InvalidRequest(f"{name} is {value}; it must be {right}", name)


def _refusal(name: str, value: object) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:79] + "…"
    allowed = _NEUTRAL[name]
    only = f"; leave it out, or send {' or '.join(map(repr, allowed))}" if allowed else "; leave it out"
    return f"{name} is not supported here (got {shown}){only}"
