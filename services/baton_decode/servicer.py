"""Decode.Generate: reserves pages, has the prompt's KV entries brought in, and streams tokens."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc

from baton_actors.deadline import Deadline
from baton_config.sections import DecodeSettings
from baton_decode.receiver import KvReceiver, Received, for_want_of_room
from baton_engine import messages
from baton_engine.messages import EngineInfo, FinishReason, Sampling
from baton_engine.scheduler import Finished, NewTokens, PrefillAdvanced, Sequence
from baton_rpc.deadline import incoming_deadline
from baton_rpc.errors import RemoteError
from baton_telemetry.metrics import DecodeMetrics
from baton_worker.background import first_of
from baton_worker.engine_actor import SequenceStream
from baton_worker.engine_host import EngineHost
from baton_worker.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest, PrefillUnavailable
from baton_worker.worker import Worker

log = logging.getLogger(__name__)

# The prefill worker's account of a request (timeline, cached tokens) is awaited this long at the request's end. It
# comes soon after the last write, unless that worker is stuck.
ACCOUNT_WAIT_S = 2.0
# And so long with the first token, which may be the last that a client wants: it ends at a stop string, and has only
# what it was told by then. The account comes with the last write, a millisecond before or after the first step of a
# small model, long before that of a large one.
FIRST_ACCOUNT_WAIT_S = 0.01
MAX_LOGPROBS = 20

Context = grpc.aio.ServicerContext[Any, Any]
_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """One call is one request, from its reservation to its last token."""

    def __init__(self, worker: Worker, settings: DecodeSettings, metrics: DecodeMetrics, receiver: KvReceiver) -> None:
        self._worker = worker
        self._settings = settings
        self._metrics = metrics
        self._receiver = receiver

    async def Generate(
        self, request: decode_pb2.DecodeGenerateRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        outcome = "cancelled"
        try:
            # Closed at once, as is the stream below: what they let go of must not wait for the garbage collector.
            with self._worker.background.attended():
                async with aclosing(self._generate(request, context)) as responses:
                    async for response in responses:
                        yield response
            outcome = "ok"
        except Exception as error:
            outcome = getattr(error, "reason", "internal").lower()
            raise
        finally:
            self._metrics.requests.labels(outcome=outcome).inc()

    async def _generate(
        self, request: decode_pb2.DecodeGenerateRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeGenerateResponse, None]:
        account = _Account(self._worker.worker_id)
        engines = self._worker.engines
        self._validate(engines.info, request)
        prompt = tuple(request.prompt_token_ids)
        sequence_id = self._worker.next_sequence_id()
        owner = ("request", sequence_id)
        # The last token drawn is never written.
        count = -(-(len(prompt) + request.sampling.max_tokens - 1) // engines.info.page_size)
        deadline = incoming_deadline(context, self._settings.queue_timeout_s)
        chain = engines.chain(prompt, request.cache_salt)
        engine, reservation = await engines.reserve(owner, count, deadline.remaining(), chain)
        account.reserved(reservation.cached * engine.info.page_size)
        self._metrics.queue_seconds.observe(account.timeline.reserve_us / 1e6)
        submitted = False
        try:
            computed = await self._bring_in(engine, request, reservation.pages, account, incoming_deadline(context))
            sequence = Sequence(
                sequence_id=sequence_id,
                token_ids=prompt,
                pages=reservation.pages,
                computed=computed,
                max_tokens=request.sampling.max_tokens,
                stop_token_ids=frozenset({*engine.info.eos_token_ids, *request.sampling.stop_token_ids}),
                ignore_eos=request.sampling.ignore_eos,
                sampling=_sampling(request.sampling),
            )
            stream = engine.actor.submit(sequence, owner, chain)
            submitted = True
            async with aclosing(self._stream(stream, account, len(prompt))) as responses:
                async for response in responses:
                    yield response
        finally:
            if submitted:
                engine.actor.cancel(sequence_id)
            else:
                engine.reserver.release(owner)

    def _validate(self, info: EngineInfo, request: decode_pb2.DecodeGenerateRequest) -> None:
        """Raises InvalidRequest and ContextLengthExceeded."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; it needs at least one")
        if max(prompt) >= info.vocab_size:
            raise InvalidRequest(
                f"token id {max(prompt)} is outside the vocabulary of {info.vocab_size}", token_id=max(prompt)
            )
        if sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens is 0; it must be at least 1", max_tokens=0)
        if len(prompt) + sampling.max_tokens > self._worker.max_model_len:
            raise ContextLengthExceeded(len(prompt), sampling.max_tokens, self._worker.max_model_len)
        if not 0 <= sampling.temperature < float("inf"):
            raise InvalidRequest(f"temperature is {sampling.temperature}; it must be a number from 0")
        if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
            raise InvalidRequest(f"top_p is {sampling.top_p}; it must be in (0, 1]", top_p=sampling.top_p)
        if sampling.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs is {sampling.logprobs}; at most {MAX_LOGPROBS}", logprobs=sampling.logprobs)

    async def _bring_in(
        self,
        engine: EngineHost,
        request: decode_pb2.DecodeGenerateRequest,
        pages: tuple[int, ...],
        account: _Account,
        deadline: Deadline,
    ) -> int:
        """Prompt tokens that need not be computed here: all but the last, once they have been written into `pages`."""
        cached = account.timeline.decode_cached_tokens
        remote = len(request.prompt_token_ids) - 1
        policy = self._settings.local_prefill
        if remote == cached or policy == "always":
            account.timeline.local_prefill = remote > cached
            return cached
        try:
            account.received = await self._receiver.fetch(engine, request, pages, cached, deadline)
        except (PrefillUnavailable, RemoteError) as error:
            if policy == "never" or not (isinstance(error, PrefillUnavailable) or for_want_of_room(error)):
                raise
            cause = error.fields.get("cause") or "none_offered"
            if isinstance(error, RemoteError):
                cause = error.reason
            self._metrics.local_prefills.labels(cause=cause.lower()).inc()
            log.warning("request %s: computing the prompt here: %s", request.request_id, error)
            account.timeline.local_prefill = True
            return cached
        return remote

    async def _stream(
        self, stream: SequenceStream, account: _Account, prompt_tokens: int
    ) -> AsyncGenerator[decode_pb2.DecodeGenerateResponse, None]:
        async for event in stream:
            match event.update:
                case PrefillAdvanced() if event.step is not None:
                    account.chunk(event.update.computed, event.step.compute_us)
                case NewTokens():
                    interval = account.token(event.step)
                    self._metrics.generated_tokens.inc(len(event.update.token_ids))
                    histogram = (
                        self._metrics.time_to_first_token_seconds
                        if account.tokens == 1
                        else self._metrics.inter_token_seconds
                    )
                    histogram.observe(interval)
                    if account.tokens == 1 and account.received is not None:
                        await first_of(account.received.run, timeout=FIRST_ACCOUNT_WAIT_S)
                    response = decode_pb2.DecodeGenerateResponse(
                        token_ids=event.update.token_ids,
                        logprobs=[_logprobs(position) for position in event.update.logprobs],
                    )
                    if account.has_news():
                        response.usage.CopyFrom(account.usage(prompt_tokens))
                        response.timeline.CopyFrom(account.timeline)
                    yield response
                case Finished(reason=reason) if reason in _REASONS:
                    timeline = await account.close()
                    yield decode_pb2.DecodeGenerateResponse(
                        finish_reason=_REASONS[reason], usage=account.usage(prompt_tokens), timeline=timeline
                    )
                case Finished(reason=reason):
                    raise EngineUnavailable(f"the generation ended early: {reason.value}")


class _Account:
    """Where one request's time goes."""

    def __init__(self, worker_id: str) -> None:
        self._arrived = time.monotonic_ns()
        self._first_ns = self._last_ns = 0
        self._computed = 0
        self.tokens = 0
        self.received: Received | None = None
        # Whether the prefill worker's account is in the timeline.
        self._complete = False
        self.timeline = common_pb2.Timeline(decode_worker=worker_id)

    def reserved(self, cached_tokens: int) -> None:
        """`cached_tokens`: of the prompt, found in this worker's prefix cache."""
        self.timeline.reserve_us = (time.monotonic_ns() - self._arrived) // 1000
        self.timeline.decode_cached_tokens = self._computed = cached_tokens

    def chunk(self, computed: int, compute_us: int) -> None:
        """A chunk of the prompt was computed here."""
        self.timeline.chunks.add(tokens=computed - self._computed, compute_us=compute_us)
        self._computed = computed

    def token(self, step: messages.StepResult | None) -> float:
        """One more token; seconds since the one before, or since the arrival."""
        now = time.monotonic_ns()
        since = self._last_ns or self._arrived
        if self.tokens == 0:
            self._first_ns = now
            self.timeline.time_to_first_token_us = (now - self._arrived) // 1000
            if step is not None:
                self.timeline.first_decode_step_us = step.compute_us
        self._last_ns = now
        self.tokens += 1
        return (now - since) / 1e9

    def has_news(self) -> bool:
        """With the first token, and when the prefill worker's account has come since: the timeline is worth telling."""
        return self._take_account() or self.tokens == 1

    def usage(self, prompt_tokens: int) -> common_pb2.Usage:
        # Whoever computes the rest computes all that it has not cached itself, even what only the other side has.
        timeline = self.timeline
        cached = timeline.decode_cached_tokens if self.received is None else timeline.prefill_cached_tokens
        return common_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=self.tokens, cached_tokens=cached)

    async def close(self) -> common_pb2.Timeline:
        if self.tokens > 1:
            self.timeline.inter_token_us = (self._last_ns - self._first_ns) // 1000 // (self.tokens - 1)
        if self.received is not None:
            await first_of(self.received.run, timeout=ACCOUNT_WAIT_S)
            self._take_account()
        return self.timeline

    def _take_account(self) -> bool:
        """Whether the prefill worker's account is in the timeline now and was not before."""
        if self.received is None or self._complete:
            return False
        self.timeline.inbox_us = self.received.inbox_us
        self.timeline.prefill_retries = self.received.retries
        self.timeline.prefill_worker = self.received.worker_id
        self._complete = self.received.run.done()
        if not self._complete:
            return False
        result = self.received.run.result()
        if not isinstance(result, Exception):
            self.timeline.prefill_queue_us = result.queue_us
            self.timeline.chunks.extend(result.chunks)
            self.timeline.prefill_cached_tokens = result.cached_tokens
            self.timeline.transfer.CopyFrom(result.transfer)
        return True


def _sampling(params: common_pb2.SamplingParams) -> Sampling:
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _logprobs(position: messages.PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=position.sampled.token_id, logprob=position.sampled.logprob),
        top=[common_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in position.top],
    )
