"""The public gRPC API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from baton.v1 import inference_pb2, inference_pb2_grpc

from baton_gateway.errors import InvalidRequest
from baton_gateway.requests import Generation, Prompt
from baton_gateway.service import Arrival, GatewayService, new_request_id
from baton_rpc import incoming_deadline

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """request_timeout_s: longest time that a request may take, whatever its deadline says."""

    def __init__(self, service: GatewayService, request_timeout_s: float) -> None:
        self._service = service
        self._request_timeout_s = request_timeout_s

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        arrival = Arrival("grpc")
        service = self._service
        service.require_model(request.model)
        with service.admission.admit():
            prompt = await self._prompt(request)
            service.check(prompt, request.sampling, request.stop)
            generation = Generation(
                request_id=new_request_id(),
                prompt=prompt,
                sampling=request.sampling,
                stop=tuple(request.stop),
                deadline=incoming_deadline(context, self._request_timeout_s),
                client_request_id=request.client_request_id,
                cache_salt=request.cache_salt,
            )
            async with aclosing(service.generate(generation, arrival)) as increments:
                async for increment in increments:
                    response = inference_pb2.GenerateResponse(
                        text=increment.text,
                        token_ids=increment.token_ids,
                        logprobs=increment.logprobs,
                        finish_reason=increment.finish_reason,
                        request_id=generation.request_id,
                    )
                    if increment.finished:
                        response.usage.CopyFrom(increment.usage)
                        response.timeline.CopyFrom(increment.timeline)
                    yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._service.require_model(request.model)
        prompt = await self._prompt(request)
        return inference_pb2.TokenizeResponse(
            token_ids=prompt.token_ids, max_model_len=self._service.max_model_len() or 0
        )

    async def Models(self, request: inference_pb2.ModelsRequest, context: Context) -> inference_pb2.ModelsResponse:
        service = self._service
        model = inference_pb2.Model(
            id=service.model, max_model_len=service.max_model_len() or 0, created=service.created
        )
        return inference_pb2.ModelsResponse(models=[model])

    async def _prompt(self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._service.tokenize_text(request.text)
            case "chat":
                if not request.chat.messages:
                    raise InvalidRequest("chat holds no messages; it needs at least one", "chat")
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return await self._service.tokenize_chat(messages)
            case "token_ids" if isinstance(request, inference_pb2.GenerateRequest):
                return Prompt(tuple(request.token_ids.ids))
        raise InvalidRequest("the request has no prompt; set text, token_ids or chat", "prompt")
