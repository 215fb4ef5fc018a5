"""Prefill.Run: computes a prompt and sees its pages written into the decode worker's memory."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
from baton.v1 import agent_pb2, common_pb2, prefill_pb2, prefill_pb2_grpc

from baton_engine.messages import FinishReason
from baton_engine.scheduler import Finished, PrefillAdvanced, Sequence
from baton_kv.plan import common_page_size, pages_to_transfer
from baton_prefill.sender import KvSender, Outgoing
from baton_rpc.deadline import incoming_deadline
from baton_rpc.errors import RemoteError
from baton_rpc.layouts import layout_message, transferable
from baton_telemetry.metrics import PrefillMetrics
from baton_worker.agent_session import AgentSession, Transfer
from baton_worker.background import first_of
from baton_worker.engine_actor import SequenceStream
from baton_worker.engine_host import EngineHost
from baton_worker.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    IncompatibleWorker,
    InvalidRequest,
    TransferBroken,
)
from baton_worker.letting_go import let_go
from baton_worker.observation import CANCELLING_TRANSFER
from baton_worker.worker import Worker

log = logging.getLogger(__name__)

AGENT_WAIT_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """One call of `Run` is one prompt and one transfer."""

    def __init__(self, worker: Worker, metrics: PrefillMetrics, sender: KvSender) -> None:
        self._worker = worker
        self._metrics = metrics
        self._sender = sender

    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        outcome = "cancelled"
        try:
            with self._worker.background.attended():
                response = await self._run(request, context)
            outcome = "ok"
        except Exception as error:
            outcome = getattr(error, "reason", "internal").lower()
            raise
        finally:
            self._metrics.requests.labels(outcome=outcome).inc()
        if response.HasField("transfer"):
            self._metrics.queue_seconds.observe(response.queue_us / 1e6)
            self._metrics.transfer_seconds.observe(response.transfer.duration_us / 1e6)
            self._metrics.exposed_seconds.observe(response.transfer.exposed_us / 1e6)
        return response

    async def _run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        arrived = time.monotonic_ns()
        engine = self._worker.engine
        self._validate(engine, request)
        prompt = tuple(request.prompt_token_ids)
        page_size = engine.info.page_size
        smaller = common_page_size(page_size, request.inbox.layout.page_size)
        if not pages_to_transfer(len(prompt), request.prefix_tokens, smaller):
            return prefill_pb2.RunResponse()
        sequence_id = self._worker.next_sequence_id()
        owner = ("request", sequence_id)
        deadline = incoming_deadline(context, self._worker.section.queue_timeout_s)
        chain = engine.chain(prompt, request.cache_salt)
        count = -(-(len(prompt) - 1) // page_size)
        reservation = await engine.reserver.reserve(owner, count, deadline.remaining(), chain)
        pages, cached = reservation.pages, reservation.cached * page_size
        outgoing: Outgoing | None = None
        submitted = held = False
        try:
            # Before anything is awaited: another transfer of the same cached pages may go into quarantine meanwhile,
            # and who holds them by then may go on reading.
            engine.reserver.hold(pages, ("transfer", sequence_id))
            held = True
            session = await engine.link.session(AGENT_WAIT_S)
            skipped = request.prefix_tokens // page_size
            transfer = await self._open(session, request, pages[skipped:])
            outgoing = Outgoing(session, transfer, len(prompt), request.prefix_tokens, smaller)
            self._sender.track(sequence_id, outgoing)
            if cached:
                # What is cached was computed by a step that is done.
                assert engine.actor.last_step is not None
                self._sender.send_cached(outgoing, cached, engine.actor.last_step)
            stream: SequenceStream | None = None
            if cached < len(prompt) - 1:
                sequence = Sequence(
                    sequence_id=sequence_id, token_ids=prompt, pages=pages, computed=cached, prefill_only=True
                )
                stream = engine.actor.submit(sequence, owner, chain)
                submitted = True
            return await self._complete(stream, outgoing, arrived, cached)
        finally:
            if submitted:
                engine.actor.cancel(sequence_id)
            else:
                engine.reserver.release(owner)
            if outgoing is not None:
                self._worker.background.spawn(
                    self._let_go(engine, outgoing.session, outgoing.transfer, sequence_id),
                    f"end of transfer {outgoing.transfer.transfer:x}",
                )
            elif held:
                engine.reserver.release(("transfer", sequence_id))

    def _validate(self, engine: EngineHost, request: prefill_pb2.RunRequest) -> None:
        """Raises InvalidRequest, ContextLengthExceeded, IncompatibleWorker. The agent checks the pages' bounds."""
        info = engine.info
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; it needs at least one")
        if len(prompt) > self._worker.max_model_len:
            raise ContextLengthExceeded(len(prompt), 0, self._worker.max_model_len)
        if max(prompt) >= info.vocab_size:
            raise InvalidRequest(
                f"token id {max(prompt)} is outside the vocabulary of {info.vocab_size}", token_id=max(prompt)
            )
        ours, theirs = layout_message(engine.layout, info.dtype, info.kv_heads), request.inbox.layout
        if not transferable(ours, theirs):
            raise IncompatibleWorker(f"the KV layouts differ: ours {_short(ours)}; the caller's {_short(theirs)}")
        if request.prefix_tokens % theirs.page_size or request.prefix_tokens > len(prompt):
            raise InvalidRequest(
                f"prefix_tokens is {request.prefix_tokens}; it must be a multiple of {theirs.page_size}, at most "
                f"{len(prompt)}",
                prefix_tokens=request.prefix_tokens,
            )
        wanted = pages_to_transfer(len(prompt), request.prefix_tokens, theirs.page_size)
        if len(request.pages) != wanted:
            raise InvalidRequest(
                f"{len(request.pages)} destination pages for a transfer of {wanted}", pages=len(request.pages)
            )

    @staticmethod
    async def _open(session: AgentSession, request: prefill_pb2.RunRequest, source: tuple[int, ...]) -> Transfer:
        """Raises AgentUnavailable and TransferBroken: another worker's agent may take what this node's refuses."""
        try:
            return await session.open_transfer(
                request.inbox, source, list(request.pages), prefix_tokens=request.prefix_tokens
            )
        except RemoteError as error:
            raise TransferBroken(f"the agent refused the transfer: {error}", cause=error.reason) from error

    @staticmethod
    async def _complete(
        stream: SequenceStream | None, outgoing: Outgoing, arrived: int, cached: int
    ) -> prefill_pb2.RunResponse:
        """Until the prompt is computed and every write is complete. `stream` None: all of it was `cached`."""
        response = prefill_pb2.RunResponse(cached_tokens=cached)
        computing = asyncio.ensure_future(_compute(stream, response, arrived))
        ended = outgoing.transfer.ended
        try:
            await first_of(computing, ended, outgoing.broken)
            while not ended.done() and not outgoing.broken.done():
                # The computation ended first, as it should; what it raised is the reason for everything after.
                computing.result()
                await first_of(ended, outgoing.broken)
            if not ended.done():
                raise TransferBroken(outgoing.broken.result())
            event = ended.result()
            if isinstance(event, agent_pb2.TransferFailed):
                raise TransferBroken(f"the transfer failed: {event.reason}", cause=event.reason)
            # The last page can be on its way before the sequence's end is told.
            await computing
            response.transfer.CopyFrom(event.stats)
            return response
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def _let_go(self, engine: EngineHost, session: AgentSession, transfer: Transfer, sequence_id: int) -> None:
        """The transfer's hold on the pages ends when nothing can read them any more."""

        ended = transfer.ended
        if not ended.done():
            outcome = "cancelled"
        else:
            outcome = "done" if isinstance(ended.result(), agent_pb2.TransferDone) else "failed"
        self._metrics.transfers.labels(outcome=outcome).inc()

        async def quiesce() -> None:
            if not transfer.ended.done():
                await session.cancel_transfer(transfer)

        await let_go(engine.reserver, ("transfer", sequence_id), quiesce, session.lost, reason=CANCELLING_TRANSFER)
        session.forget(transfer)
        # Until here a step that fails has to wait for this transfer's end too.
        self._sender.forget(sequence_id)


async def _compute(stream: SequenceStream | None, response: prefill_pb2.RunResponse, arrived: int) -> None:
    if stream is None:
        return
    done = response.cached_tokens
    async for event in stream:
        if isinstance(event.update, PrefillAdvanced) and event.step is not None:
            if not response.chunks:
                response.queue_us = max(0, event.step.started_ns - arrived) // 1000
            response.chunks.add(tokens=event.update.computed - done, compute_us=event.step.compute_us)
            done = event.update.computed
        elif isinstance(event.update, Finished) and event.update.reason is not FinishReason.PREFILLED:
            raise EngineUnavailable(f"the prompt was not computed: {event.update.reason.value}")


def _short(layout: common_pb2.KvLayout) -> str:
    order = common_pb2.KvOrder.Name(layout.order).removeprefix("KV_ORDER_")
    return (
        f"{order} {layout.dtype}, {layout.layers} layers, {layout.kv_heads} x {layout.head_dim}, pages of "
        f"{layout.page_size}"
    )
