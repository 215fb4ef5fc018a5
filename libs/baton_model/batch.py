"""What one forward pass computes: some tokens of some sequences, and where their KV entries lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .errors import InvalidBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """N new tokens of B sequences, concatenated in the order of the sequences.

    * `token_ids`, `positions`: int64 `[N]`.
    * `query_lens`: new tokens of each sequence, at least 1; they sum to N.
    * `context_lens`: tokens of each sequence after this pass, the new ones included. Entries of earlier tokens are in
      the cache already.
    * `page_tables`: pages of each sequence in the order of its tokens, as lists or as an integer tensor
      `[B, max_pages]`; at least `ceil(context_len / page_size)` of each row are read.

    A sequence with one new token is a decode, one with more a chunk of a prompt; a batch may mix them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    page_tables: Sequence[Sequence[int]] | torch.Tensor

    @classmethod
    def build(
        cls,
        sequences: Sequence[tuple[Sequence[int], int]],
        page_tables: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """From `(new token ids, tokens already in the cache)` of each sequence."""
        tokens = [token for ids, _ in sequences for token in ids]
        positions = [start + i for ids, start in sequences for i in range(len(ids))]
        return cls(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_lens=[len(ids) for ids, _ in sequences],
            context_lens=[start + len(ids) for ids, start in sequences],
            page_tables=page_tables,
        )

    def on(self, device: torch.device) -> ForwardBatch:
        """The same batch, its tokens on `device`."""
        return replace(self, token_ids=self.token_ids.to(device), positions=self.positions.to(device))

    def table(self, sequence: int, count: int) -> list[int]:
        """The first `count` pages of a sequence. Raises `InvalidBatch` where it has fewer."""
        row = self.page_tables[sequence]
        pages = row.tolist() if isinstance(row, torch.Tensor) else list(row)
        if len(pages) < count:
            raise InvalidBatch(
                f"sequence {sequence} of the batch has {len(pages)} pages; its {self.context_lens[sequence]} tokens "
                f"need {count}",
                sequence=sequence,
                pages=len(pages),
                needed=count,
            )
        return pages[:count]

    def token_range(self) -> tuple[int, int] | None:
        """The least and the greatest token id. None where they lie on a device: looking would mean waiting for it, and
        whoever put them there has looked."""
        if self.token_ids.device.type != "cpu" or not len(self.token_ids):
            return None
        return int(self.token_ids.min()), int(self.token_ids.max())

    def validate(self) -> None:
        """Raises `InvalidBatch` where the parts contradict each other."""
        tokens, sequences = self.token_ids.numel(), len(self.query_lens)
        if self.token_ids.shape != (tokens,) or self.positions.shape != (tokens,):
            raise InvalidBatch(
                f"token_ids and positions are {list(self.token_ids.shape)} and {list(self.positions.shape)}; both "
                f"must be one-dimensional and equally long"
            )
        if not sequences:
            raise InvalidBatch("the batch is empty; it must have at least one sequence")
        if sum(self.query_lens) != tokens:
            raise InvalidBatch(f"query_lens sum to {sum(self.query_lens)}; the batch has {tokens} tokens")
        if len(self.context_lens) != sequences or len(self.page_tables) != sequences:
            raise InvalidBatch(
                f"{sequences} query_lens, {len(self.context_lens)} context_lens and {len(self.page_tables)} "
                f"page_tables; there must be one of each for every sequence"
            )
        for sequence, (query, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if not 1 <= query <= context:
                raise InvalidBatch(
                    f"sequence {sequence} has {query} new tokens in a context of {context}; there must be at least "
                    f"one, and no more than the context",
                    sequence=sequence,
                    query_len=query,
                    context_len=context,
                )
