"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_tokenizer.errors import InvalidStop


@dataclass(frozen=True)
class StopStep:
    """text: what may be shown now. stopped: a stop string is complete; nothing follows."""

    text: str
    stopped: bool


class StopChecker:
    """Cuts text at the first stop string, which is not part of it, and never shows text that may become one.

    The stop string that is complete first counts; of those complete at the same character, the longest. So the result
    depends on the text only, not on how it was divided into increments. Text is compared by code points: no
    normalisation.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InvalidStop("a stop string is empty; it must hold at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopStep:
        """Takes the next increment. After a stop everything is swallowed."""
        if self._stopped:
            return StopStep("", True)
        if not self._stops:
            return StopStep(text, False)
        buffer = self._held + text
        # (end, start): first complete, then longest.
        matches = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return StopStep(buffer[: min(matches)[1]], True)
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return StopStep(buffer[: len(buffer) - keep], False)

    def flush(self) -> str:
        """What is still held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
