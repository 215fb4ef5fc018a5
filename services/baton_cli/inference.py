"""The public API from a terminal."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from baton_cli.probe import credentials
from baton_config import Settings
from baton_rpc import RemoteError, open_channel

if TYPE_CHECKING:
    Channel = grpc.aio.Channel


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


@dataclass
class Answer:
    """What one call returned, complete once its stream has ended."""

    text: str = ""
    finish_reason: str = ""
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    timeline: common_pb2.Timeline = field(default_factory=common_pb2.Timeline)
    request_id: str = ""


class InferenceClient:
    """Calls the gateway; use as an asynchronous context manager."""

    def __init__(self, settings: Settings) -> None:
        self._target = settings.gateway.grpc
        self._channel = open_channel(self._target, credentials(settings))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._timeout = settings.gateway.request_timeout_s

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: str | Sequence[tuple[str, str]], sampling: Sampling, answer: Answer
    ) -> AsyncIterator[str]:
        """Yields text as it comes and fills ``answer``. ``prompt``: text, or a chat of (role, content).

        Raises RemoteError.
        """
        request = inference_pb2.GenerateRequest(sampling=sampling.to_proto(), stop=sampling.stop)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.messages.extend(inference_pb2.ChatMessage(role=role, content=text) for role, text in prompt)
        try:
            async for response in self._stub.Generate(request, timeout=self._timeout):
                answer.text += response.text
                if response.text:
                    yield response.text
                if response.finish_reason:
                    answer.finish_reason = _reason(response.finish_reason)
                    answer.usage, answer.timeline = response.usage, response.timeline
                    answer.request_id = response.request_id
        except grpc.aio.AioRpcError as error:
            raise self._explained(RemoteError.from_rpc(error)) from None

    def _explained(self, error: RemoteError) -> RemoteError:
        if error.status == "UNAVAILABLE" and error.reason == "UNAVAILABLE":
            message = f"no gateway answers at {self._target}; start one with `baton up` ({error.message})"
            return RemoteError(error.status, message, "NO_GATEWAY", {"address": self._target})
        return error


def _reason(value: "common_pb2.FinishReason.ValueType") -> str:
    return common_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower()
