"""Runs a model over a small paged cache of its own: what the model tests need of an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import torch

from baton_model.batch import ForwardBatch
from baton_model.cache import PageOrder, open_cache
from baton_model.model import Model


class PagedRunner:
    """Sequences get pages from a shuffled list, so that no test passes by pages lying in order."""

    def __init__(self, model: Model, pages: int, page_size: int = 16, order: PageOrder = "HND", seed: int = 0) -> None:
        shape = model.cache_shape
        token = shape.kv_heads * shape.head_dim * (1 if shape.latent else 2)
        self.model = model
        self.cache = open_cache(
            bytearray(shape.layers * pages * page_size * token * model.dtype.itemsize),
            shape,
            order=order,
            pages=pages,
            page_size=page_size,
            dtype=model.dtype,
        )
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self, new_tokens: dict[str, Sequence[int]], on_layer: Callable[[int], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """One forward pass over the new tokens of each named sequence; the logits of every new token, by sequence."""
        sequences, tables = [], []
        for name, tokens in new_tokens.items():
            table, length = self._tables.setdefault(name, []), self._lengths.get(name, 0)
            self._lengths[name] = length + len(tokens)
            while len(table) * self.cache.page_size < self._lengths[name]:
                table.append(self._free.pop())
            sequences.append((tokens, length))
            tables.append(table)
        hidden = self.model.forward(ForwardBatch.build(sequences, tables), self.cache, on_layer)
        rows = self.model.logits(hidden).split([len(tokens) for tokens in new_tokens.values()])
        return dict(zip(new_tokens, rows, strict=True))

    def run(self, name: str, tokens: Sequence[int], chunks: Iterable[int]) -> torch.Tensor:
        """Feeds a sequence chunk by chunk; what `chunks` leave over goes as a last one. Logits of every token."""
        rows, start = [], 0
        for size in [*chunks, len(tokens)]:
            if part := tokens[start : start + size]:
                rows.append(self.step({name: part})[name])
            start += size
        return torch.cat(rows)

    def free(self, name: str) -> None:
        """Gives a sequence's pages back, with whatever is in them."""
        self._free.extend(self._tables.pop(name))
        del self._lengths[name]
