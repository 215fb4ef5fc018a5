"""The gateway's core, the same for both APIs: admits, tokenises, dispatches, and turns tokens into text."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from baton.v1 import common_pb2

from baton_gateway.dispatch import Dispatcher, Trace
from baton_gateway.errors import ModelNotFound, Overloaded
from baton_gateway.output import Increment, OutputAssembler
from baton_gateway.requests import (
    Generation,
    Prompt,
    check_prompt,
    check_sampling,
    check_stop,
    end_token_ids,
    fit_to_context,
)
from baton_rpc import describe
from baton_telemetry import GatewayMetrics
from baton_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Shorter texts are tokenised in the event loop: under 1 ms, about what a hop to a thread and back costs under load.
INLINE_CHARACTERS = 4096


def new_request_id() -> str:
    """Unique among all requests of all gateways."""
    return f"req-{secrets.token_hex(16)}"


class Admission:
    """A bounded number of requests in flight. Pure."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    @contextmanager
    def admit(self, count: int = 1) -> Iterator[None]:
        """All of them or none. Raises Overloaded."""
        if self.in_flight + count > self.limit:
            raise Overloaded(
                f"{self.in_flight} requests are in flight, {count} more would exceed the limit of {self.limit}; "
                "try again later",
                in_flight=self.in_flight,
                limit=self.limit,
            )
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count


@dataclass
class Progress:
    """Whether requests get anywhere. Pure; the caller gives the time, in seconds.

    waiting: requests that wait for workers. One whose client is slow to read does not: it is no sign of a jam.
    """

    waiting: int = 0
    last: float = 0.0

    def wait(self, now: float) -> None:
        """A request begins to wait for its next message."""
        if self.waiting == 0:
            self.last = now
        self.waiting += 1

    def moved(self, now: float) -> None:
        """A request that waited has its message, or has ended in whatever way."""
        self.waiting -= 1
        self.last = now

    def idle_for(self, now: float) -> float:
        """Seconds in which requests waited and nothing happened to any of them."""
        return now - self.last if self.waiting else 0.0


@dataclass(frozen=True)
class Arrival:
    """When a request came in, and by which API ("grpc" or "http")."""

    api: str
    at: float = field(default_factory=time.monotonic)


class GatewayService:
    def __init__(
        self, model: str, tokenizer: Tokenizer, dispatcher: Dispatcher, metrics: GatewayMetrics, max_requests: int
    ) -> None:
        self.model = model
        self.created = int(time.time())
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.admission = Admission(max_requests)
        self.progress = Progress()
        self._dispatcher = dispatcher

    # --- before a worker is needed ------------------------------------------------------------------------------------

    def require_model(self, name: str) -> None:
        """An empty name means the only model. Raises ModelNotFound."""
        if name and name != self.model:
            raise ModelNotFound(f"the model {name!r} does not exist; this gateway serves {self.model!r}", model=name)

    def max_model_len(self) -> int | None:
        """Context of the model in tokens, None while no decode worker is there."""
        return self._dispatcher.context_length()

    def require_route(self) -> None:
        """Raises NoWorker if an ordinary request could not be served now."""
        self._dispatcher.require_route()

    async def tokenize_text(self, text: str) -> Prompt:
        """Raises InvalidText."""
        return await self._tokenize(len(text), lambda: self.tokenizer.encode(text))

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Raises NoChatTemplate, InvalidChat, InvalidText."""
        size = sum(len(value) for message in messages for value in message.values())
        return await self._tokenize(size, lambda: self.tokenizer.encode_chat(messages))

    async def _tokenize(self, size: int, encode: Callable[[], list[int]]) -> Prompt:
        started = time.perf_counter()
        ids = encode() if size <= INLINE_CHARACTERS else await asyncio.to_thread(encode)
        elapsed = time.perf_counter() - started
        self.metrics.tokenize_seconds.observe(elapsed)
        return Prompt(tuple(ids), int(elapsed * 1e6))

    def check(self, prompt: Prompt, sampling: common_pb2.SamplingParams, stop: Sequence[str]) -> None:
        """Raises InvalidRequest and ContextLengthExceeded: everything that can be known without a worker's answer."""
        check_prompt(prompt.token_ids, self.tokenizer.vocab_size)
        check_sampling(sampling, self.tokenizer.vocab_size)
        check_stop(stop)
        context = self.max_model_len()
        if context is not None:
            fit_to_context(len(prompt.token_ids), sampling.max_tokens, context)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, generation: Generation, arrival: Arrival) -> AsyncGenerator[Increment, None]:
        """Increments of one request, the last of them finished. Whoever iterates must close it.

        Admission is the caller's, because one HTTP request may hold several of these.
        """
        tokenizer, metrics = self.tokenizer, self.metrics
        ends = end_token_ids(generation.sampling, tokenizer)
        prompt_tokens = len(generation.prompt.token_ids)
        assembler = OutputAssembler(tokenizer, prompt_tokens, generation.stop, ends)
        generation = _with_end_ids(generation, ends)
        trace = Trace()
        outcome = "cancelled"
        self.progress.wait(time.monotonic())
        waiting = True
        in_flight = metrics.requests_in_flight.labels(api=arrival.api)
        in_flight.inc()
        first_token: float | None = None
        last_token: float | None = None
        try:
            async with aclosing(self._dispatcher.stream(generation, trace)) as responses:
                async for response in responses:
                    now = time.monotonic()
                    self.progress.moved(now)
                    waiting = False
                    increment = assembler.take(response)
                    if increment.token_ids:
                        if first_token is None or last_token is None:
                            first_token = now
                            metrics.time_to_first_token_seconds.observe(now - arrival.at)
                            metrics.prompt_tokens.inc(prompt_tokens)
                        else:
                            metrics.inter_token_seconds.observe(now - last_token)
                        last_token = now
                        metrics.completion_tokens.inc(len(increment.token_ids))
                    if increment.finished:
                        outcome = "ok"
                        _complete(increment.timeline, generation, trace)
                        if first_token is not None and last_token is not None:
                            _complete_rhythm(increment, last_token - first_token)
                    yield increment
                    if increment.finished:
                        return
                    self.progress.wait(time.monotonic())
                    waiting = True
        except Exception as error:
            outcome = describe(error).code.name.lower()
            raise
        finally:
            now = time.monotonic()
            in_flight.dec()
            if waiting:
                self.progress.moved(now)
            metrics.requests.labels(api=arrival.api, outcome=outcome).inc()
            metrics.request_seconds.labels(api=arrival.api).observe(now - arrival.at)
            logger.debug(
                "request ended",
                extra={
                    "request_id": generation.request_id,
                    "client_request_id": generation.client_request_id,
                    "outcome": outcome,
                    "decode_worker": trace.decode_worker,
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": assembler.completion_tokens,
                },
            )


def _with_end_ids(generation: Generation, ends: frozenset[int]) -> Generation:
    """The tokenizer's end-of-sequence ids travel with the request: a generation config may name more than the weights'
    own metadata, and what ends the text here must end the work there."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(generation.sampling)
    del sampling.stop_token_ids[:]
    sampling.stop_token_ids.extend(sorted(ends))
    return replace(generation, sampling=sampling)


def _complete(timeline: common_pb2.Timeline, generation: Generation, trace: Trace) -> None:
    timeline.tokenize_us = generation.prompt.tokenize_us
    timeline.route_us = trace.route_us
    timeline.decode_worker = timeline.decode_worker or trace.decode_worker


def _complete_rhythm(increment: Increment, seconds: float) -> None:
    """A worker whose stream was ended at a stop string has not said how fast its tokens came; `seconds`: the first to
    the last, as they came here."""
    tokens = increment.usage.completion_tokens
    if not increment.timeline.inter_token_us and tokens > 1:
        increment.timeline.inter_token_us = int(seconds * 1e6 / (tokens - 1))
