"""What a valid generation is: the checks that both APIs share. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import common_pb2

from baton_actors.deadline import Deadline
from baton_gateway.errors import ContextLengthExceeded, InvalidRequest
from baton_tokenizer import Tokenizer

# As vLLM has it; OpenAI allows 4 and 5.
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
# Held-back text is compared with every beginning of every stop string at each token.
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True)
class Prompt:
    """token_ids: at least one. tokenize_us: what it took to get them."""

    token_ids: tuple[int, ...]
    tokenize_us: int = 0


@dataclass(frozen=True)
class Generation:
    """A request that passed all checks but those that need a worker.

    request_id: made here. client_request_id: for logs. max_tokens of sampling 0: the default. cache_salt: cached
    prefixes are shared only with requests of the same.
    """

    request_id: str
    prompt: Prompt
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    deadline: Deadline
    client_request_id: str = ""
    cache_salt: str = ""


def check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest. Does not look at max_tokens, whose default the two APIs don't share."""
    if sampling.HasField("temperature") and not 0 <= sampling.temperature < math.inf:
        raise _out_of_range("temperature", sampling.temperature, "a finite number of at least 0")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "more than 0 and at most 1")
    if sampling.HasField("logprobs") and sampling.logprobs > MAX_LOGPROBS:
        raise _out_of_range("logprobs", sampling.logprobs, f"from 0 to {MAX_LOGPROBS}")
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            raise _out_of_range("stop_token_ids", token_id, f"ids from 0 to {vocab_size - 1}")


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    for text in stop:
        if not text:
            raise InvalidRequest("stop holds an empty string; each must have at least one character", "stop")
        if len(text) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop holds a string of {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed", "stop"
            )
    return tuple(stop)


def check_cache_salt(salt: str) -> str:
    """Raises InvalidRequest for what JSON can spell and is no text: half of a surrogate pair."""
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("cache_salt holds a lone surrogate; it must be valid Unicode", "cache_salt") from error
    return salt


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an empty prompt and for ids that the model does not have."""
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens; it must have at least one", "prompt")
    for bound in (min(token_ids), max(token_ids)):
        if not 0 <= bound < vocab_size:
            raise _out_of_range("prompt", bound, f"token ids from 0 to {vocab_size - 1}")


def fit_to_context(prompt_tokens: int, max_tokens: int, max_model_len: int, default: int = 1) -> int:
    """max_tokens, or for 0 the default as far as the context allows. Raises ContextLengthExceeded.

    A prompt needs room for one generated token, and prompt and max_tokens must fit together.
    """
    if prompt_tokens + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; this model's context is {max_model_len} tokens, of which at least "
            "one is left to the answer",
            "prompt",
            prompt_tokens=prompt_tokens,
            max_model_len=max_model_len,
        )
    if prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, {prompt_tokens + max_tokens} in "
            f"all; this model's context is {max_model_len} tokens",
            "max_tokens",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
        )
    return max_tokens or min(default, max_model_len - prompt_tokens)


def end_token_ids(sampling: common_pb2.SamplingParams, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end the generation."""
    if sampling.ignore_eos:
        return frozenset()
    return frozenset({*tokenizer.eos_token_ids, *sampling.stop_token_ids})


def _out_of_range(name: str, value: object, right: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {right}", name)
