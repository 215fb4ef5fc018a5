"""The receiving side's messenger: has a prompt's KV entries written into this worker's pages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from baton.v1 import agent_pb2, common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2

from baton_actors.deadline import Deadline
from baton_config.sections import DecodeSettings
from baton_kv.checksum import transfer_tokens
from baton_kv.errors import KvError
from baton_kv.plan import expected_extents, pages_to_transfer
from baton_kv.shards import ShardMap
from baton_rpc.addresses import AddressError
from baton_rpc.errors import RemoteError
from baton_rpc.layouts import layout_message, transferable
from baton_telemetry.metrics import DecodeMetrics
from baton_worker.agent_session import AgentSession, Checked, Inbox
from baton_worker.background import first_of
from baton_worker.engine_host import EngineHost
from baton_worker.errors import AgentUnavailable, ExceedsPagePool, PrefillUnavailable, TransferBroken
from baton_worker.letting_go import let_go, until_quiesced
from baton_worker.observation import CLOSING_INBOX
from baton_worker.worker import Worker

log = logging.getLogger(__name__)

AGENT_WAIT_S = 3.0
# The sender's delivery completion is in, so the last immediate has reached this node: what remains is one event.
SETTLE_S = 2.0
# With a checksum, the sender's has to come and ours to be made: 0.1 s for each GB, on a busy machine more.
CHECK_S = 10.0

PrefillResult = prefill_pb2.RunResponse | RemoteError


@dataclass(frozen=True)
class Received:
    """Everything is here. `run` is the prefill worker's own account, which may come a little later."""

    worker_id: str
    inbox_us: int
    retries: int
    run: asyncio.Task[PrefillResult]


@dataclass(frozen=True)
class _Wanted:
    """What every attempt asks for."""

    request: decode_pb2.DecodeGenerateRequest
    pages: Sequence[int]
    prefix_tokens: int
    # The request's own.
    deadline: Deadline


class KvReceiver:
    """Tries prefill workers until one has filled the pages."""

    def __init__(self, worker: Worker, settings: DecodeSettings, metrics: DecodeMetrics) -> None:
        self._worker = worker
        self._settings = settings
        self._metrics = metrics

    async def fetch(
        self,
        engine: EngineHost,
        request: decode_pb2.DecodeGenerateRequest,
        pages: Sequence[int],
        prefix_tokens: int,
        deadline: Deadline,
    ) -> Received:
        """Has prompt positions [prefix_tokens, T - 1) written into `pages`, which start at position 0.

        Raises PrefillUnavailable when the attempts are used up, a worker's refusal if it was about the request, the
        last one's if it was for want of room, or DeadlineExceeded. Whatever happens, the pages are let go only when no
        write can follow.
        """
        candidates = [worker for worker in request.prefill_workers if self._compatible(engine, worker)]
        if not candidates:
            raise PrefillUnavailable(
                f"none of the {len(request.prefill_workers)} prefill workers offered serves this model and layout",
                offered=len(request.prefill_workers),
            )
        wanted = _Wanted(request, pages, prefix_tokens, deadline)
        attempts = self._settings.prefill_attempts
        failure: Exception | None = None
        for retries, worker in enumerate(itertools.islice(itertools.cycle(candidates), attempts)):
            try:
                received = await self._attempt(engine, worker, wanted, retries)
            except (TransferBroken, AgentUnavailable, RemoteError, AddressError, KvError) as error:
                failure = error
                self._metrics.prefill_attempts.labels(outcome=error.reason.lower()).inc()
                log.warning("request %s: prefill worker %s: %s", request.request_id, worker.worker_id, error)
                if _about_the_request(error):
                    # No other worker would take it either.
                    raise
                deadline.check(f"request {request.request_id}")
                continue
            self._metrics.prefill_attempts.labels(outcome="ok").inc()
            return received
        if failure is not None and for_want_of_room(failure):
            raise failure
        raise PrefillUnavailable(
            f"no prefill worker could compute the prompt in {attempts} attempts; the last one: {failure}",
            attempts=attempts,
            cause=getattr(failure, "reason", ""),
        )

    @staticmethod
    def _compatible(engine: EngineHost, worker: registry_pb2.WorkerInfo) -> bool:
        info = engine.info
        ours = layout_message(engine.layout, info.dtype, info.kv_heads)
        same_model = worker.model.fingerprint == info.fingerprint
        return same_model and transferable(worker.layout, ours) and worker.HasField("agent")

    async def _attempt(
        self, engine: EngineHost, worker: registry_pb2.WorkerInfo, wanted: _Wanted, retries: int
    ) -> Received:
        request, pages, prefix_tokens = wanted.request, wanted.pages, wanted.prefix_tokens
        info = engine.info
        prompt_tokens = len(request.prompt_token_ids)
        session = await engine.link.session(AGENT_WAIT_S)
        expected = expected_extents(
            ShardMap(
                info.kv_heads,
                worker.sharding.tensor_parallel or 1,
                worker.sharding.data_parallel or 1,
                mla=info.order == "MLA",
            ),
            engine.shard_map,
            info.order,
            prompt_tokens=prompt_tokens,
            prefix_tokens=prefix_tokens,
            page_size=info.page_size,
            source_page_size=worker.layout.page_size,
            layers=info.layers,
        )
        first = prefix_tokens // info.page_size
        destination = pages[first : first + pages_to_transfer(prompt_tokens, prefix_tokens, info.page_size)]
        prefill = prefill_pb2_grpc.PrefillStub(self._worker.peers.get(worker.address))
        checked = None
        if self._settings.checksum != "none":
            tokens = transfer_tokens(prompt_tokens, prefix_tokens, worker.layout.page_size, info.page_size)
            checked = Checked(destination, tokens)
        inbox = await self._open(session, worker.agent, expected, checked, engine.dp_rank)
        # From here on the inbox owns the pages too: a write may be under way until it is closed.
        owner = ("inbox", session.session, *inbox.key)
        engine.reserver.hold(list(destination), owner)
        started = time.monotonic_ns()
        limit = wanted.deadline.limited(self._settings.prefill_timeout_s)
        call = prefill.Run(
            prefill_pb2.RunRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                inbox=inbox.descriptor,
                pages=destination,
                prefix_tokens=prefix_tokens,
                cache_salt=request.cache_salt,
            ),
            timeout=limit.remaining(),
        )
        run = self._worker.background.spawn(_result(call), f"Prefill.Run {request.request_id}")
        try:
            full = await self._wait(inbox, run, limit)
        except BaseException as error:
            call.cancel()
            closing = self._worker.background.spawn(
                let_go(engine.reserver, owner, lambda: self._close(session, inbox), session.lost, reason=CLOSING_INBOX),
                f"close of inbox {inbox.key}",
            )
            if isinstance(error, TransferBroken | RemoteError):
                self._metrics.transfers.labels(outcome="failed").inc()
                # The next attempt writes into the same pages.
                await asyncio.shield(closing)
            else:
                self._metrics.transfers.labels(outcome="cancelled").inc()
            raise
        self._metrics.transfers.labels(outcome="done").inc()
        engine.reserver.release(owner)
        self._worker.background.spawn(
            until_quiesced(lambda: self._close(session, inbox), session.lost, f"inbox {inbox.key}"),
            f"close of inbox {inbox.key}",
        )
        inbox_ns = max(0, full.full_ns - started) if full.full_ns else time.monotonic_ns() - started
        self._metrics.inbox_seconds.observe(inbox_ns / 1e9)
        return Received(worker.worker_id, inbox_ns // 1000, retries, run)

    async def _wait(self, inbox: Inbox, run: asyncio.Task[PrefillResult], limit: Deadline) -> agent_pb2.InboxFull:
        """Until the inbox is full; raises TransferBroken or RemoteError when that is not to be expected any more."""
        await first_of(inbox.ended, run, timeout=limit.remaining())
        if not inbox.ended.done() and run.done():
            result = run.result()
            if isinstance(result, RemoteError):
                raise result
            await first_of(inbox.ended, timeout=SETTLE_S if self._settings.checksum == "none" else CHECK_S)
        if not inbox.ended.done():
            raise TransferBroken("the prefill worker is done or silent, and the inbox is not full")
        event = inbox.ended.result()
        if isinstance(event, agent_pb2.InboxFailed):
            raise TransferBroken(f"the inbox failed: {event.reason}", cause=event.reason)
        return event

    @staticmethod
    async def _open(
        session: AgentSession,
        sender: common_pb2.AgentDescriptor,
        expected: int,
        checked: Checked | None,
        dp_rank: int,
    ) -> Inbox:
        """Raises AgentUnavailable and TransferBroken: what this node's agent refuses is no fault of the request."""
        try:
            return await session.open_inbox(sender, expected, checked, dp_rank=dp_rank)
        except RemoteError as error:
            raise TransferBroken(f"the agent refused an inbox: {error}", cause=error.reason) from error

    @staticmethod
    async def _close(session: AgentSession, inbox: Inbox) -> None:
        outcome = await session.close_inbox(inbox)
        log.info("inbox %s closed: %s", inbox.key, outcome)


def for_want_of_room(error: Exception) -> bool:
    """A prefill worker's refusal: another may have the pages, now or at all."""
    return isinstance(error, RemoteError) and (
        error.status == "RESOURCE_EXHAUSTED" or error.reason == ExceedsPagePool.reason
    )


def _about_the_request(error: Exception) -> bool:
    return isinstance(error, RemoteError) and error.status == "INVALID_ARGUMENT" and not for_want_of_room(error)


async def _result(call: grpc.aio.UnaryUnaryCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]) -> PrefillResult:
    """The call's answer or its failure, as a value: nobody may be waiting when it comes."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return RemoteError.from_rpc(error)
    except asyncio.CancelledError:
        return RemoteError("CANCELLED", "the call was cancelled")
