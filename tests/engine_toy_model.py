"""A model process with a toy for a model: `python engine_toy_model.py --fd N --parent PID`.

The toy keeps its whole memory in the KV cache, so that a wrong page, position or chunk changes what it says: the next
token is a sum over the cached context. Some tokens, and some model paths, make it misbehave.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton_engine.errors import EngineError
from baton_engine.model_process import main
from baton_engine.runner import Batch, ModelFacts, Progress

if TYPE_CHECKING:
    import torch

    from baton_engine.messages import EngineSpec
    from baton_kv.layout import PageLayout
    from baton_model.parallel import RankGroup

LAYERS = 3
VOCABULARY = 64
RAISE = 63  # the forward pass raises after its first layer
NAN = 62  # the logits are not numbers
HANG = 61  # the forward pass never ends
COMPLAIN = 60  # a line to stderr

REFUSES, HANGS, CRASHES = "refuses", "hangs", "crashes"


class ToyRefuses(EngineError):
    status = "NOT_FOUND"
    reason = "TOY_NOT_FOUND"


class ToyModel:
    facts = ModelFacts(
        model="toy",
        fingerprint="t0",
        layers=LAYERS,
        kv_heads=1,
        rank_kv_heads=1,
        head_dim=2,
        vocab_size=VOCABULARY,
        eos_token_ids=(0,),
        max_model_len=256,
    )

    def bind(self, memory: memoryview, layout: PageLayout) -> None:
        import torch

        self._page_size = layout.page_size
        self._cache = torch.frombuffer(memory, dtype=torch.float32).view(layout.shape)

    def forward(self, batch: Batch, on_layer: Callable[[int], None]) -> torch.Tensor:
        import torch

        for layer in range(LAYERS):
            token = 0
            for pages, length in zip(batch.page_tables, batch.query_lens, strict=True):
                for index in range(token, token + length):
                    page, offset = divmod(batch.positions[index], self._page_size)
                    self._cache[layer, pages[page], 0, 0, offset, 0] = batch.token_ids[index] + 1
                    self._cache[layer, pages[page], 1, 0, offset, 0] = batch.positions[index] + 1
                token += length
            on_layer(layer)
            self._misbehave(batch)
        rows = [
            self._next_token(pages, context)
            for pages, context in zip(batch.page_tables, batch.context_lens, strict=True)
        ]
        last = {sum(batch.query_lens[: index + 1]) - 1: row for index, row in enumerate(rows)}
        logits = torch.zeros(len(batch.sampled), VOCABULARY)
        for row, index in enumerate(batch.sampled):
            logits[row, last[index]] = 5.0
        return logits * (torch.nan if NAN in batch.token_ids else 1.0)

    def _misbehave(self, batch: Batch) -> None:
        if RAISE in batch.token_ids:
            raise RuntimeError("the toy was told to fail")
        if HANG in batch.token_ids:
            signal.pause()
        if COMPLAIN in batch.token_ids:
            logging.getLogger("toy").warning("the toy complains")

    def _next_token(self, pages: tuple[int, ...], context: int) -> int:
        total = 0
        for position in range(context):
            page, offset = divmod(position, self._page_size)
            token, at = (float(self._cache[LAYERS - 1, pages[page], plane, 0, offset, 0]) for plane in (0, 1))
            total += int(token * at)
        return 1 + total % 50


def load(spec: EngineSpec, progress: Progress, group: RankGroup) -> ToyModel:
    progress("toy", 0.5)
    if spec.model_path == REFUSES:
        raise ToyRefuses("there is no such toy")
    if spec.model_path == HANGS:
        signal.pause()
    if spec.model_path == CRASHES:
        os._exit(3)
    return ToyModel()


if __name__ == "__main__":
    sys.exit(main(load_model=load))
