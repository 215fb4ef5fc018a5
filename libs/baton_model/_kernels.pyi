"""What a CPU computes of a model, for the instruction set of this processor.

Tensors come as addresses (`data_ptr()`), contiguous unless a stride is given, in elements; `bfloat16` says which of the
two element types they have. Nothing is checked. Calls release the GIL and use `threads` threads, those of OpenMP that
torch uses too.
"""

from collections.abc import Sequence

def instruction_set() -> str:
    """avx512bf16, avx512vnni, avx512, avxvnni, avx2 or portable: the best there is, or the one that
    BATON_KERNELS names."""

class AttentionStep:
    """Attention of one forward pass over a paged cache of keys and values."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        tokens_first: bool,
        bfloat16: bool,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        tables: Sequence[Sequence[int]],
        threads: int,
    ) -> None:
        """`tables`: pages of each sequence, enough for its context. `tokens_first`: NHD, otherwise HND."""

    def run(self, cache: int, queries: int, query_stride: int, entries: int, entry_stride: int, out: int, /) -> None:
        """See `baton_model.attention.base.AttentionStep`. `cache`: the layer's first page."""

class Int8Matrix:
    """Weights of eight bits, in the order in which they are multiplied."""

    def __init__(self, weights: int, scales: int, outputs: int, inputs: int, block: int, /) -> None:
        """`weights`: s8 `[outputs, inputs]`, none of them -128, its rows in units of `scales`, float `[outputs]`.
        Both are copied. Tokens are multiplied by Hadamard's matrix in blocks of `block` inputs, a power of two."""

    def multiply(self, x: int, bias: int, out: int, rows: int, bfloat16: bool, threads: int, /) -> None:
        """`x` `[rows, inputs]` to `out` `[rows, outputs]`, each row quantised by itself; plus `bias` `[outputs]` unless
        that is 0."""

def rms_norm(
    x: int, weight: int, out: int, rows: int, size: int, eps: float, bfloat16: bool, threads: int, /
) -> None: ...
def silu_and_mul(x: int, out: int, rows: int, inner: int, bfloat16: bool, threads: int, /) -> None:
    """`x`: `[rows, 2 * inner]`, gate before up."""

def rotate(
    x: int,
    stride: int,
    cos: int,
    sin: int,
    rows: int,
    heads: int,
    head_dim: int,
    bfloat16: bool,
    threads: int,
    /,
) -> None:
    """In place: `x` `[rows, heads, head_dim]`, rows `stride` apart; `cos`, `sin` (signed) `[rows, head_dim]`."""

def uniform(seed: int, position: int, attempt: int, /) -> float:
    """A number in [0, 1) hashed from its arguments, each 64 bits without a sign."""

def draw(
    logits: int,
    size: int,
    temperatures: Sequence[float],
    top_p: Sequence[float],
    top_k: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    threads: int,
    /,
) -> list[int]:
    """A token from each row of float32 logits `[rows, size]`, -1 where its largest is not finite. Temperature 0 is
    greedy; `top_k` 0 and `top_p` 1 keep all."""
