"""Which part of a layer a tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kv.shards import even_slices, head_slices

from .errors import InvalidConfig
from .parallel import RankGroup

# Neurons that stay together where every rank gets four times as many, so that no rank has more than a quarter more than
# its share: its part of a matrix then begins and ends where kernels and quantised blocks like it, and is rotated well
# before it is rounded to eight bits.
_NEURONS = 64


def even_share(size: int, group: RankGroup) -> range:
    """This rank's part of `size` things that split anywhere, such as experts. Shares follow each other in order of
    rank, differ by one at most, and may be empty."""
    return even_slices(size, group.ranks)[group.rank]


def word_share(vocab_size: int, group: RankGroup) -> range:
    """This rank's words of the vocabulary: as `even_share`, but never none. Raises `InvalidConfig`."""
    if group.ranks > vocab_size:
        raise InvalidConfig(
            f"{group.ranks} ranks can't share a vocabulary of {vocab_size}; there must be a word for each at least",
            ranks=group.ranks,
            vocab_size=vocab_size,
        )
    return even_share(vocab_size, group)


def neuron_share(size: int, group: RankGroup) -> range:
    """This rank's part of the inner neurons of a feed-forward block: as `even_share`, but in blocks of 64 where there
    are enough."""
    block = _NEURONS if size >= 4 * _NEURONS * group.ranks else 1
    blocks = even_share(-(-size // block), group)
    return range(blocks.start * block, min(blocks.stop * block, size))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query and the KV heads of a rank, as ranges of the model's. Query head j of the rank reads its KV head
    `j // (queries / keys)`."""

    queries: range
    keys: range


def head_share(heads: int, kv_heads: int, group: RankGroup) -> HeadShare:
    """KV heads as the cache is sharded (`head_slices`), and the query heads that read them. Where several ranks have
    copies of one KV head, its query heads are split evenly over them.

    Raises `ShardingImpossible` as `head_slices` does, and `InvalidConfig` where a rank would have no query head.
    """
    if group.ranks > heads:
        raise InvalidConfig(
            f"{group.ranks} ranks can't share {heads} query heads; there must be one for each at least",
            ranks=group.ranks,
            heads=heads,
        )
    keys = head_slices(kv_heads, group.ranks)[group.rank]
    queries_a_key, copies = heads // kv_heads, max(1, group.ranks // kv_heads)
    if copies == 1:
        return HeadShare(range(keys.start * queries_a_key, keys.stop * queries_a_key), keys)
    part = even_slices(queries_a_key, copies)[group.rank % copies]
    first = keys.start * queries_a_key
    return HeadShare(range(first + part.start, first + part.stop), keys)


def rows_of(heads: range, size: int) -> range:
    """The rows of a projection that make these heads of `size` dimensions."""
    return range(heads.start * size, heads.stop * size)
