"""Runs forward steps: keeps the sequences, builds batches, moves the layer counter, samples."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton_engine.errors import SequenceInvalid, SpecInvalid
from baton_engine.messages import ELEMENT_SIZES, EngineSpec, SequenceStart, StepItem, StepPlan, StepResult
from baton_engine.place import HostPlace, Place
from baton_engine.runner import Batch, ModelFacts, ModelRunner
from baton_engine.sampler import Draw
from baton_kv.layout import PageLayout
from baton_kv.shards import head_slices
from baton_model.parallel import SOLO, RankGroup

if TYPE_CHECKING:
    import torch


def cache_layout(spec: EngineSpec, facts: ModelFacts) -> PageLayout:
    """The cache of one rank as the spec wants it, or as the model does. All ranks have the same number of pages, as
    many as fit the budget of the one with the most heads. Raises SpecInvalid."""
    if (spec.kv_bytes is None) == (spec.pages is None):
        raise SpecInvalid(f"kv_bytes is {spec.kv_bytes} and pages is {spec.pages}; exactly one must be given")
    one_page = PageLayout(
        order=facts.order or spec.order,
        layers=facts.layers,
        pages=1,
        page_size=spec.page_size,
        kv_heads=facts.rank_kv_heads,
        head_dim=facts.head_dim,
        element_size=ELEMENT_SIZES[spec.dtype],
    )
    most = max(len(heads) for heads in head_slices(1 if facts.order == "MLA" else facts.kv_heads, spec.ranks))
    largest = dataclasses.replace(one_page, kv_heads=most).region_bytes
    pages = spec.pages if spec.pages is not None else (spec.kv_bytes or 0) // largest
    if pages < 1:
        given = f"pages is {spec.pages}" if spec.pages is not None else f"kv_bytes is {spec.kv_bytes or 0}"
        raise SpecInvalid(
            f"the KV cache has no room for a page: {given}, and a page of all layers takes {largest} bytes",
            page_bytes=largest,
        )
    return dataclasses.replace(one_page, pages=pages)


# Tokens of a probe: enough for the speed of long products, and 0.1 s of the default model on a slow core.
_PROBE = 64
# The fastest of these counts: what else runs on the machine only ever adds time.
_PROBES = 2
# Below the first, products are no longer efficient; beyond the second, larger chunks are no faster.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 32, 4096


def chunk_for(chunk_s: float, tokens: int, seconds: float) -> int:
    """The largest power of two of tokens that takes `chunk_s` at most where `tokens` of them take `seconds`, within
    [32, 4096]."""
    chunk = _SMALLEST_CHUNK
    while chunk < _LARGEST_CHUNK and 2 * chunk * seconds <= chunk_s * tokens:
        chunk *= 2
    return chunk


class Executor:
    """One rank's model, cache and layer counter.

    Rank 0 leads. Its `counter` goes from `step * layers` to `(step + 1) * layers`, and when it passes a layer, every
    rank has written that layer's entries: each does so before it joins in the sum of the attention's outputs, and rank
    0 moves the counter after it. The other ranks' counters stand still. Only rank 0 draws tokens.
    """

    def __init__(
        self, runner: ModelRunner, layout: PageLayout, group: RankGroup = SOLO, place: Place | None = None
    ) -> None:
        """`place` has room for the cache; by default one is made on the host, which raises OSError if there is none."""
        self.layout = layout
        self._group = group
        self._place = place or HostPlace(layout.region_bytes)
        self.memory, self.counter = self._place.memory, self._place.counter
        self._runner = runner
        self._sequences: dict[int, SequenceStart] = {}
        runner.bind(self._place.buffer, layout)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the sequences that were started and not released."""
        return tuple(self._sequences)

    def warm_up(self) -> None:
        """Runs a short prompt and a decode through page 0, before anything lives there: the first pass is slower."""
        for tokens in (min(self.layout.page_size, 16), 1):
            self._runner.forward(
                Batch([0] * tokens, range(tokens), [tokens], [tokens], [[0]], [tokens - 1]), lambda layer: None
            )
        self._place.prepare(self._runner)

    def measure_chunk(self, chunk_s: float) -> int:
        """How many tokens of a prompt take `chunk_s` seconds at most, by what a few take now; all ranks do it together.

        A power of two, so that it is the same from start to start; see `chunk_for`.
        """
        tokens = min(_PROBE, self._runner.facts.max_model_len)
        pages = [0] * -(-tokens // self.layout.page_size)
        batch = Batch([0] * tokens, range(tokens), [tokens], [tokens], [pages], [])
        seconds = []
        for _ in range(_PROBES):
            begin = time.perf_counter()
            self._runner.forward(batch, lambda layer: None)
            self._place.finish()
            seconds.append(time.perf_counter() - begin)
        return chunk_for(chunk_s, tokens, min(seconds))

    def run(self, plan: StepPlan, started_ns: int) -> StepResult:
        """Runs a step, as all ranks do. Raises whatever the model raises, SequenceInvalid, NonFiniteLogits, and
        GroupBroken if another rank failed.

        After a failure the counter stands at the last layer that was written, so that nothing of the step that was
        not computed is taken for computed; the next step begins by moving it past the failed one.
        """
        self._group.begin(plan.step)
        try:
            logits, forward_ns, layer_ends = self._forward(plan)
        except BaseException:
            self._group.abort()
            # A device may still be writing what was queued, and with this answer the pages become somebody else's. And
            # a sum that the other ranks did not come to must not be joined in by the next step's.
            with contextlib.suppress(Exception):
                self._place.finish()
            raise
        forwarded_ns = time.monotonic_ns()
        # No rank waits for another any more: what goes wrong from here on is not the group's.
        draws = [
            Draw(sampling, item.end)
            for item in plan.items
            if item.sample and (sampling := self._sequences[item.sequence_id].sampling) is not None
        ]
        tokens, logprobs = self._place.sample(logits, draws) if draws and self._group.rank == 0 else ((), ())
        return StepResult(
            plan.step,
            tokens,
            logprobs,
            started_ns,
            forward_ns,
            forwarded_ns,
            time.monotonic_ns(),
            # Where a device moves the counter, it knows when each layer was done, and is not asked.
            tuple(layer_ends) or (forwarded_ns,) * self.layout.layers,
        )

    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, int, list[int]]:
        """The logits that are to be drawn from, when the pass began, and when each layer ended, if that is known."""
        layers = self.layout.layers
        for sequence_id in plan.releases:
            self._sequences.pop(sequence_id, None)
        for start in plan.starts:
            self._sequences[start.sequence_id] = start
        base = plan.step * layers
        self._place.begin(base)
        self._advance(base)
        batch = self._batch(plan)
        layer_ends: list[int] = []
        forward_ns = time.monotonic_ns()
        logits = self._runner.forward(batch, self._on_layer(plan, base, layer_ends))
        self._place.finish()
        self._advance(base + layers)
        return logits, forward_ns, layer_ends

    def _advance(self, value: int) -> None:
        if self._group.rank == 0 and self.counter.value() < value:
            self.counter.advance(value)

    def _on_layer(self, plan: StepPlan, base: int, layer_ends: list[int]) -> Callable[[int], None]:
        if self._place.on_layer is not None:
            return self._place.on_layer
        # Pages leave during a step only if it prefills for another worker. Other steps ring once, at their end: each
        # ring wakes the agent, on what may be this process's own core.
        if not any(self._sequences[item.sequence_id].sampling is None for item in plan.items):
            return lambda layer: layer_ends.append(time.monotonic_ns())

        def on_layer(layer: int) -> None:
            layer_ends.append(time.monotonic_ns())
            self._advance(base + layer + 1)

        return on_layer

    def _batch(self, plan: StepPlan) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        page_tables: list[tuple[int, ...]] = []
        page_size = self.layout.page_size
        for item in plan.items:
            pages = self._pages(item)
            token_ids += item.token_ids
            positions += range(item.start, item.end)
            page_tables.append(pages[: -(-item.end // page_size)])
            if item.sample:
                sampled.append(len(token_ids) - 1)
        return Batch(
            token_ids,
            positions,
            [len(item.token_ids) for item in plan.items],
            [item.end for item in plan.items],
            page_tables,
            sampled,
        )

    def _pages(self, item: StepItem) -> tuple[int, ...]:
        """The sequence's pages, checked: a wrong one would write into another's memory."""
        start = self._sequences.get(item.sequence_id)
        if start is None:
            raise SequenceInvalid(
                f"sequence {item.sequence_id} was never started, or is released", sequence=item.sequence_id
            )
        if not item.token_ids or item.start < 0 or item.end > len(start.pages) * self.layout.page_size:
            raise SequenceInvalid(
                f"sequence {item.sequence_id}: positions {item.start} to {item.end} don't fit its "
                f"{len(start.pages)} pages of {self.layout.page_size} tokens",
                sequence=item.sequence_id,
            )
        if not all(0 <= page < self.layout.pages for page in start.pages):
            raise SequenceInvalid(
                f"sequence {item.sequence_id} names a page outside 0 to {self.layout.pages - 1}",
                sequence=item.sequence_id,
            )
        if item.sample and start.sampling is None:
            raise SequenceInvalid(f"sequence {item.sequence_id} is prefill-only and can't sample", step=item.start)
        return start.pages
