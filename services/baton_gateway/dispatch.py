"""Sends a request to a decode worker, and to another one if the first is gone before it has answered anything."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

import grpc
from baton.v1 import decode_pb2, decode_pb2_grpc, registry_pb2

from baton_gateway.affinity import PrefixMemory, Trail
from baton_gateway.cluster import Cluster
from baton_gateway.errors import BrokenStream, NoWorker
from baton_gateway.registry import WorkerKey, worker_key
from baton_gateway.requests import Generation, fit_to_context
from baton_gateway.routing import Route, RoutingRules, choose, context_length
from baton_rpc import RemoteError

logger = logging.getLogger(__name__)

# Decode workers tried for one request: one may die, and a second with it, but a third failure is the cluster's state.
MAX_ATTEMPTS = 3


@dataclass
class Trace:
    """Filled while a request is dispatched. route_us: choosing, waiting for a worker included."""

    route_us: int = 0
    decode_worker: str = ""
    attempts: int = 0
    tried: set[WorkerKey] = field(default_factory=set)


class Dispatcher:
    def __init__(
        self,
        cluster: Cluster,
        rules: RoutingRules,
        worker_wait_s: float,
        default_max_tokens: int,
        prefixes: PrefixMemory | None = None,
    ) -> None:
        """`prefixes` None: routes don't depend on what workers may have cached."""
        self._cluster = cluster
        self._prefixes = prefixes
        self._rules = rules
        self._worker_wait_s = worker_wait_s
        self._default_max_tokens = default_max_tokens

    def require_route(self, prompt_tokens: int = 2, max_tokens: int = 1) -> None:
        """Raises the NoWorker error that a request of ordinary kind would end with just now."""
        choose(self._cluster.candidates(), self._rules, prompt_tokens, max_tokens)

    def context_length(self) -> int | None:
        return context_length(self._cluster.candidates(), self._rules.model)

    async def stream(
        self, generation: Generation, trace: Trace
    ) -> AsyncGenerator[decode_pb2.DecodeGenerateResponse, None]:
        """The decode worker's messages; the last has a finish reason. Closing the iterator cancels the worker's call.

        Raises NoWorker, ContextLengthExceeded, RemoteError (what the worker said), BrokenStream.
        """
        trail: Trail | None = None
        if self._prefixes is not None:
            trail = Trail(self._prefixes, generation.prompt.token_ids, generation.cache_salt)
        while True:
            route = await self._route(generation, trace, trail)
            trace.attempts += 1
            trace.decode_worker = route.decode.worker_id
            answered = False
            try:
                # Closed by hand: a generator that is left alone is only closed by the garbage collector.
                async with aclosing(self._attempt(generation, route, trace.attempts, trail)) as responses:
                    async for response in responses:
                        answered = True
                        yield response
                return
            except grpc.aio.AioRpcError as error:
                failure = RemoteError.from_rpc(error)
                trace.tried.add(worker_key(route.decode))
                retry = error.code() is grpc.StatusCode.UNAVAILABLE and not answered and trace.attempts < MAX_ATTEMPTS
                if not retry or not self._another(generation, trace, trail):
                    raise failure from error
                logger.warning(
                    "request %s: decode worker %s failed before its first token, trying another: %s",
                    generation.request_id,
                    route.decode.worker_id,
                    failure.message,
                )

    async def _attempt(
        self, generation: Generation, route: Route, number: int, trail: Trail | None
    ) -> AsyncGenerator[decode_pb2.DecodeGenerateResponse, None]:
        prompt = generation.prompt.token_ids
        sampling = generation.sampling
        context = route.decode.model.max_model_len
        request = decode_pb2.DecodeGenerateRequest(
            # The former attempt may still be alive somewhere.
            request_id=generation.request_id if number == 1 else f"{generation.request_id}.{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            prefill_workers=route.prefill,
            cache_salt=generation.cache_salt,
        )
        default = min(self._default_max_tokens, max(1, _room(route.decode) - len(prompt)))
        request.sampling.max_tokens = fit_to_context(len(prompt), sampling.max_tokens, context, default)
        key = worker_key(route.decode)
        prefills = {worker.worker_id: worker_key(worker) for worker in route.prefill}
        with ExitStack() as stack:
            stack.enter_context(self._cluster.loads.request(key))
            offer = None
            if route.prefill:
                offer = self._cluster.loads.prompt(worker_key(route.prefill[0]), len(prompt))
                stack.callback(offer.close)
            stub = decode_pb2_grpc.DecodeStub(stack.enter_context(self._cluster.channel(route.decode)))
            call = stub.Generate(request, timeout=generation.deadline.remaining())
            # Whatever ends this attempt, the worker hears of it at once; after the last message this does nothing.
            stack.callback(call.cancel)
            if trail is not None:
                stack.callback(trail.ended, key)
            finished = False
            async for response in call:
                if offer is not None and response.token_ids:
                    offer.close()
                if trail is not None:
                    trail.answered(response.token_ids, key, prefills.get(response.timeline.prefill_worker))
                finished = finished or response.finish_reason != 0
                yield response
            if not finished:
                raise BrokenStream(
                    f"decode worker {route.decode.worker_id} ended its answer without a finish reason",
                    worker=route.decode.worker_id,
                )

    async def _route(self, generation: Generation, trace: Trace, trail: Trail | None) -> Route:
        """Waits a while for a worker to be there: between a crash and the restart's registration lie seconds."""
        started = time.monotonic_ns()
        wait = generation.deadline.limited(self._worker_wait_s)
        try:
            while True:
                changed = self._cluster.changed
                try:
                    return self._choose(generation, trace, trail)
                except NoWorker:
                    if wait.passed:
                        raise
                await _wait_for(changed, wait.remaining())
        finally:
            trace.route_us += (time.monotonic_ns() - started) // 1000

    def _choose(self, generation: Generation, trace: Trace, trail: Trail | None) -> Route:
        sampling = generation.sampling
        return choose(
            self._cluster.candidates(),
            self._rules,
            len(generation.prompt.token_ids),
            sampling.max_tokens,
            trace.tried,
            trail.held() if trail is not None else {},
        )

    def _another(self, generation: Generation, trace: Trace, trail: Trail | None) -> bool:
        try:
            self._choose(generation, trace, trail)
        except NoWorker:
            return False
        return True


def _room(worker: registry_pb2.WorkerInfo) -> int:
    """Most tokens of prompt and answer that one page pool of the worker can hold; the last one drawn is never
    written."""
    pages = worker.load.total_pages // (worker.sharding.data_parallel or 1)
    return pages * worker.layout.page_size + 1 if pages else worker.model.max_model_len


async def _wait_for(event: asyncio.Event, timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return
