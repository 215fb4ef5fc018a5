"""The OpenAI HTTP API."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from baton.v1 import common_pb2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from baton_actors.deadline import Deadline, DeadlineExceeded
from baton_gateway.errors import GatewayError, ShuttingDown
from baton_gateway.health import Health
from baton_gateway.http_errors import from_status, from_validation, to_http
from baton_gateway.http_middleware import REQUEST_ID_HEADER, RequestEnvelope
from baton_gateway.http_stream import CLIENT_CLOSED_REQUEST, ClientGone, EventStream, merged, until_client_leaves
from baton_gateway.openai_responses import ChatForm, Choice, CompletionForm, Form, Json
from baton_gateway.openai_schema import ChatRequest, CompletionRequest
from baton_gateway.output import Increment
from baton_gateway.requests import Generation, Prompt, check_cache_salt, check_prompt, check_stop
from baton_gateway.service import Arrival, GatewayService
from baton_rpc import RemoteError
from baton_tokenizer import TokenizerError


@dataclass(frozen=True)
class Job:
    """One HTTP request, checked as far as its own words go.

    prompts: how many completions it asks for. prepare: tokenises them, in the same order, once they are admitted.
    """

    arrival: Arrival
    request_id: str
    client_request_id: str
    deadline: Deadline
    prompts: int
    prepare: Callable[[], Awaitable[tuple[Form, list[Prompt]]]]
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    cache_salt: str


class OpenAiApi:
    """The endpoints, over one gateway service. request_timeout_s: longest time that a request may take."""

    def __init__(self, service: GatewayService, health: Health, request_timeout_s: float) -> None:
        self._service = service
        self._health = health
        self._request_timeout_s = request_timeout_s

    # --- generation ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        service = self._service
        body.check_supported()
        service.require_model(body.model or "")
        prompts, sampling = body.prompts(), body.completion_sampling()

        async def prepare() -> tuple[Form, list[Prompt]]:
            tokenized = [await self._prompt(prompt) for prompt in prompts]
            form = CompletionForm(
                request.state.request_id,
                service.model,
                body.include_usage,
                bool(body.timeline),
                service.tokenizer,
                [self._echo(prompt) for prompt in prompts] if body.echo else (),
            )
            return form, tokenized

        return await self._respond(request, self._job(request, body, len(prompts), prepare, sampling), body.stream)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        service = self._service
        body.check_supported()
        service.require_model(body.model or "")
        messages, sampling = body.conversation(), body.chat_sampling()

        async def prepare() -> tuple[Form, list[Prompt]]:
            form = ChatForm(
                request.state.request_id, service.model, body.include_usage, bool(body.timeline), service.tokenizer
            )
            return form, [await service.tokenize_chat(messages)]

        return await self._respond(request, self._job(request, body, 1, prepare, sampling), body.stream)

    async def _prompt(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return await self._service.tokenize_text(prompt)
        check_prompt(prompt, self._service.tokenizer.vocab_size)
        return Prompt(tuple(prompt))

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    def _job(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: int,
        prepare: Callable[[], Awaitable[tuple[Form, list[Prompt]]]],
        sampling: common_pb2.SamplingParams,
    ) -> Job:
        return Job(
            arrival=Arrival("http"),
            request_id=request.state.request_id,
            client_request_id=request.headers.get(REQUEST_ID_HEADER, "")[:128],
            deadline=Deadline.after(self._request_timeout_s),
            prompts=prompts,
            prepare=prepare,
            sampling=sampling,
            stop=check_stop(body.stop_strings()),
            cache_salt=check_cache_salt(body.cache_salt or ""),
        )

    async def _respond(self, request: Request, job: Job, stream: bool | None) -> Response:
        if stream:
            return EventStream(self._chunks(job))
        try:
            return JSONResponse(await until_client_leaves(request.receive, self._whole(job)))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except asyncio.CancelledError:
            # Only the server's own end cancels a request; the client is still there, and is told.
            return to_http(ShuttingDown()).response()

    async def _whole(self, job: Job) -> Json:
        with self._service.admission.admit(job.prompts):
            form, generations = await self._generations(job)
            choices = [Choice(index) for index in range(job.prompts)]
            async with aclosing(self._increments(job, generations)) as increments:
                async for index, increment in increments:
                    choices[index].add(increment)
            return form.whole(choices)

    async def _chunks(self, job: Job) -> AsyncGenerator[Json, None]:
        with self._service.admission.admit(job.prompts):
            form, generations = await self._generations(job)
            choices = [Choice(index) for index in range(job.prompts)]
            opened: set[int] = set()
            async with aclosing(self._increments(job, generations)) as increments:
                async for index, increment in increments:
                    if index not in opened:
                        opened.add(index)
                        if (first := form.first_chunk(index)) is not None:
                            yield first
                    if increment.finished:
                        choices[index].usage = increment.usage
                    if (chunk := form.chunk(choices[index], increment)) is not None:
                        yield chunk
            if (last := form.last_chunk(choices)) is not None:
                yield last

    async def _generations(self, job: Job) -> tuple[Form, list[Generation]]:
        form, prompts = await job.prepare()
        for prompt in prompts:
            self._service.check(prompt, job.sampling, job.stop)
        return form, [
            Generation(
                request_id=job.request_id if job.prompts == 1 else f"{job.request_id}-{index}",
                prompt=prompt,
                sampling=job.sampling,
                stop=job.stop,
                deadline=job.deadline,
                client_request_id=job.client_request_id,
                cache_salt=job.cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _increments(self, job: Job, generations: list[Generation]) -> AsyncGenerator[tuple[int, Increment], None]:
        return merged([self._service.generate(generation, job.arrival) for generation in generations])

    # --- about the gateway --------------------------------------------------------------------------------------------

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        self._service.require_model(name)
        return JSONResponse(self._model())

    def _model(self) -> Json:
        service = self._service
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "baton",
            "max_model_len": service.max_model_len(),
        }

    async def health(self) -> Response:
        problem = self._health.problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", **problem}, 503)

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._service.metrics.registry), headers={"content-type": content_type})

    async def version(self) -> Response:
        return JSONResponse({"version": importlib.metadata.version("baton")})


def make_app(service: GatewayService, health: Health, request_timeout_s: float) -> FastAPI:
    api = OpenAiApi(service, health, request_timeout_s)
    app = FastAPI(title="Baton", version=importlib.metadata.version("baton"), openapi_url="/openapi.json")
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_class=JSONResponse)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_class=JSONResponse)
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    # Names of models may contain slashes.
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/metrics", api.metrics, methods=["GET"])
    app.add_api_route("/version", api.version, methods=["GET"])
    app.add_middleware(RequestEnvelope)

    async def told(_request: Request, error: Exception) -> Response:
        return to_http(error).response()

    async def refused(_request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return to_http(error).response()
        response = from_status(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def invalid(_request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            return to_http(error).response()
        return from_validation(error.errors()).response()

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    # Listed one by one: what is handled as a plain Exception is also logged with its traceback, as a defect.
    for kind in (GatewayError, TokenizerError, RemoteError, DeadlineExceeded, TimeoutError, Exception):
        app.add_exception_handler(kind, told)
    return app
