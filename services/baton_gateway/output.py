"""From a decode worker's tokens to the text a client may see. Pure: messages in, increments out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.v1 import common_pb2, decode_pb2

from baton_tokenizer import StopChecker, Tokenizer

NOT_FINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
STOP = common_pb2.FINISH_REASON_STOP


@dataclass
class Increment:
    """What is new since the last one.

    text: safe to show. logprobs: one for each of token_ids, if asked for. finish_reason: set in the last increment
    only, as are usage and timeline.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = NOT_FINISHED
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    timeline: common_pb2.Timeline = field(default_factory=common_pb2.Timeline)

    @property
    def finished(self) -> bool:
        return self.finish_reason != NOT_FINISHED


class OutputAssembler:
    """One request's output.

    end_ids: tokens that end the generation; they count as completion tokens but are no text.
    A stop string ends the output although the worker goes on: then the increment is finished, with the usage and the
    timeline as the worker told them last, and the caller ends the worker's stream.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: int, stop: Sequence[str], end_ids: Collection[int]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopChecker(stop)
        self._end_ids = frozenset(end_ids)
        self._prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._usage = common_pb2.Usage()
        self._timeline = common_pb2.Timeline()

    def take(self, response: decode_pb2.DecodeGenerateResponse) -> Increment:
        if response.HasField("usage"):
            self._usage = response.usage
        if response.HasField("timeline"):
            self._timeline = response.timeline
        increment = Increment()
        for index, token_id in enumerate(response.token_ids):
            self.completion_tokens += 1
            increment.token_ids.append(token_id)
            increment.logprobs += response.logprobs[index : index + 1]
            if token_id in self._end_ids:
                continue
            step = self._stop.push(self._detokenizer.push([token_id]))
            increment.text += step.text
            if step.stopped:
                increment.finish_reason = STOP
                break
        if not increment.finished and response.finish_reason != NOT_FINISHED:
            increment.finish_reason = response.finish_reason
            tail = self._stop.push(self._detokenizer.flush())
            increment.text += tail.text
            if tail.stopped:
                increment.finish_reason = STOP
            else:
                increment.text += self._stop.flush()
        if increment.finished:
            increment.timeline.CopyFrom(self._timeline)
            increment.usage.CopyFrom(self._usage)
            increment.usage.prompt_tokens = self._prompt_tokens
            increment.usage.completion_tokens = self.completion_tokens
        return increment
