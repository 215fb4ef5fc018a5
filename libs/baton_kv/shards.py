"""Which rank holds which heads of the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .errors import InvalidKvArgument
from .layout import PageLayout


class ShardingImpossible(InvalidKvArgument):
    """More ranks than heads, and not a whole number of ranks for each head."""

    reason = "KV_SHARDING_IMPOSSIBLE"


def even_slices(size: int, parts: int) -> list[range]:
    """`range(size)` cut into `parts` that follow each other, the first `size % parts` one longer than the rest (3 in 2:
    2 and 1; 1 in 2: 1 and none)."""
    least, extra = divmod(size, parts)
    bounds = accumulate((least + (part < extra) for part in range(parts)), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def head_slices(kv_heads: int, tp: int) -> list[range]:
    """The heads of each of `tp` ranks, as ranges of the model's `kv_heads`.

    With at least one head a rank, these are `even_slices`. With more ranks than heads, each head is on `tp / kv_heads`
    neighbouring ranks, as query heads split evenly over the ranks need it.

    Raises `ShardingImpossible`, `InvalidKvArgument`.
    """
    if kv_heads < 1 or tp < 1:
        raise InvalidKvArgument(
            f"kv_heads is {kv_heads} and tp is {tp}; both must be at least 1", kv_heads=kv_heads, tp=tp
        )
    if tp > kv_heads:
        copies, rest = divmod(tp, kv_heads)
        if rest:
            raise ShardingImpossible(
                f"{tp} ranks can't hold {kv_heads} heads in equal numbers of copies; more ranks than heads must be a "
                f"multiple of {kv_heads}",
                kv_heads=kv_heads,
                tp=tp,
            )
        return [range(rank // copies, rank // copies + 1) for rank in range(tp)]
    return even_slices(kv_heads, tp)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """How one worker's ranks share the cache: `dp` data-parallel ranks, each of `tp` tensor-parallel ones.

    A request's cache is on one data-parallel rank. Rank numbers run through the whole worker: data-parallel rank d has
    ranks `d * tp .. (d + 1) * tp - 1`. `kv_heads_total` are the model's KV heads; `mla`: the cache is latent, one head
    for this purpose, whatever `kv_heads_total` says, and every rank of a data-parallel rank has a copy.

    Raises `ShardingImpossible`, `InvalidKvArgument`.
    """

    kv_heads_total: int
    tp: int
    dp: int = 1
    mla: bool = False

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise InvalidKvArgument(f"dp is {self.dp}; it must be at least 1", dp=self.dp)
        if self.kv_heads_total < 1:
            raise InvalidKvArgument(
                f"kv_heads_total is {self.kv_heads_total}; it must be at least 1", kv_heads_total=self.kv_heads_total
            )
        head_slices(self.heads, self.tp)

    @property
    def heads(self) -> int:
        """Heads that can be told apart: the model's, or 1 for a latent cache."""
        return 1 if self.mla else self.kv_heads_total

    @property
    def ranks(self) -> int:
        """Ranks of the whole worker."""
        return self.tp * self.dp

    @property
    def parts(self) -> int:
        """Ranks that together hold the cache once."""
        return min(self.tp, self.heads)

    @property
    def replicas(self) -> int:
        """Replica sets of one data-parallel rank."""
        return self.tp // self.parts

    def slices(self) -> list[range]:
        """Heads of the ranks of one data-parallel rank, in order of rank."""
        return head_slices(self.heads, self.tp)

    def replica_sets(self, dp_rank: int) -> list[tuple[int, ...]]:
        """Groups of ranks (worker-wide numbers) that each hold the cache of `dp_rank` once, in order of heads."""
        if not 0 <= dp_rank < self.dp:
            raise InvalidKvArgument(f"dp_rank is {dp_rank}; it must be in [0, {self.dp})", dp_rank=dp_rank)
        first, copies = dp_rank * self.tp, self.replicas
        return [tuple(range(first + copy, first + self.tp, copies)) for copy in range(copies)]

    def heads_of(self, rank: int) -> range:
        """Heads that a rank holds."""
        if not 0 <= rank < self.ranks:
            raise InvalidKvArgument(f"rank is {rank}; it must be in [0, {self.ranks})", rank=rank)
        return self.slices()[rank % self.tp]

    def layout_of(self, rank: int, layout: PageLayout) -> PageLayout:
        """`layout` with the number of heads that `rank` has; uneven splits give ranks pages of different sizes."""
        return replace(layout, kv_heads=len(self.heads_of(rank)))
