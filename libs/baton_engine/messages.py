"""What a worker and its model process say to each other.

msgspec structs, encoded as msgpack arrays; the first element of a top-level message is its tag. The worker says
`Load` first, is answered with any number of `Loading` and then `Ready` or `LoadFailed`. After that each `Attach`,
`Inspect` and `StepPlan` has one answer, in order; `AgentLost` comes unasked. Closing the socket ends the process.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec

DeviceName: TypeAlias = Literal["cpu", "cuda"]
Dtype: TypeAlias = Literal["float32", "bfloat16"]
KvOrder: TypeAlias = Literal["HND", "NHD"]
Quantization: TypeAlias = Literal["none", "int8"]
Order: TypeAlias = Literal["HND", "NHD", "MLA"]

ELEMENT_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model process is to load and how. Exactly one of `kv_bytes` and `pages` is set.

    `kv_bytes`: budget of the KV cache in bytes, rounded down to whole pages over all layers.
    `order`: how keys and values lie in a page; a model with a latent cache has its own, MLA, whatever is said here.
    `quantization` "int8": the weights of linears take eight bits; activations and cache are of `dtype` all the same.
    `cpus`: CPUs to pin the process to; empty leaves the affinity alone. `own_cpus`: no other rank runs on them.
    `role` names the process in its log lines.
    `device`: cuda has a GPU for each rank: the one that `gpus` names for its number in the worker, or of that number.
    There, `graphs` has decodes of up to `max_batch` captured in CUDA graphs.
    `chunk_s`: how long a step with part of a prompt may take: `EngineInfo.chunk_tokens` is measured from it; None: not.
    `patience_s`: a rank that comes to a sum this much later than another is stuck; all begin a step within milliseconds
    of each other and do the same, and the slowest step seen took 3 s.
    `rank` of `ranks` tensor-parallel ranks, which together are one engine; `data_parallel`: engines of the worker, each
    with a cache of its own, and `dp_rank` this one. `ranks.rank_specs` makes those of the ranks from the engine's.
    """

    model_path: str
    dtype: Dtype = "float32"
    quantization: Quantization = "none"
    device: DeviceName = "cpu"
    graphs: bool = True
    gpus: tuple[int, ...] = ()
    page_size: int = 16
    kv_bytes: int | None = None
    pages: int | None = None
    order: KvOrder = "HND"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    own_cpus: bool = True
    max_batch: int = 32
    chunk_s: float | None = None
    role: str = "engine"
    rank: int = 0
    ranks: int = 1
    patience_s: float = 30.0
    dp_rank: int = 0
    data_parallel: int = 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine is: the model's essentials and the layout of its cache.

    `kv_heads` and `head_dim` are those of the whole model, of which a rank has its share; `pages` are the same on all
    ranks. `max_model_len` counts prompt and generated tokens. A rank's cache is one region `[layers, pages, page]`, its
    pages as `baton_kv.layout.PageLayout` says of `order`. `chunk_tokens`: prompt tokens that take
    `EngineSpec.chunk_s`, as measured when the process started; None if that was not asked for.
    """

    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    order: Order
    pages: int
    page_size: int
    element_size: int
    dtype: Dtype
    max_batch: int
    pid: int
    chunk_tokens: int | None = None
    rank: int = 0
    ranks: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return (1 if self.order == "MLA" else 2) * self.kv_heads * self.page_size * self.head_dim * self.element_size


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 keeps all; `seed` is 64-bit.

    `logprobs`: None for none, otherwise how many of the best tokens to report beside the drawn one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of one token's probability in the unmodified distribution."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position: the drawn token's, and the best ones in falling order."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """Introduces a sequence to the model process. `pages`: its pages in order, for everything it may ever write.

    `sampling` None: a prefill-only sequence, of which nothing is ever drawn and whose pages a transfer reads.
    """

    sequence_id: int
    pages: tuple[int, ...]
    sampling: Sampling | None


class StepItem(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step: computes `token_ids` at positions `start` to `end` - 1.

    `sample`: draw a token after the last of them. `prefill`: a chunk of a prompt, as against a decode.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    prefill: bool

    @property
    def end(self) -> int:
        """The position after the last that this item computes: the sequence's tokens in the cache after the step."""
        return self.start + len(self.token_ids)


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One forward step. `releases` are forgotten before `starts` are learnt; `items`: decodes, then prompt chunks.

    While the step runs, the layer counter goes from `step * layers` to `(step + 1) * layers`.
    """

    step: int
    items: tuple[StepItem, ...]
    starts: tuple[SequenceStart, ...] = ()
    releases: tuple[int, ...] = ()

    @property
    def prefills(self) -> tuple[StepItem, ...]:
        """The prompt chunks: which range of which prompt this step adds to the cache."""
        return tuple(item for item in self.items if item.prefill)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(item.token_ids) for item in self.items)


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What a step gave. Times are CLOCK_MONOTONIC in nanoseconds. Only rank 0 draws tokens.

    `token_ids`: one for each item with `sample`, in the order of the items; `logprobs` likewise, or empty if no item
    asked for any. `layer_ends_ns[l]`: when layer l had its KV entries written. `started_ns`: the plan was read;
    `forward_ns` to `forwarded_ns`: the forward pass and the logits; `finished_ns`: the tokens were drawn.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs | None, ...]
    started_ns: int
    forward_ns: int
    forwarded_ns: int
    finished_ns: int
    layer_ends_ns: tuple[int, ...]

    @property
    def compute_us(self) -> int:
        """Microseconds from reading the plan to the drawn tokens."""
        return (self.finished_ns - self.started_ns) // 1000

    @property
    def first_layer_ns(self) -> int:
        return self.layer_ends_ns[0]

    @property
    def last_layer_ns(self) -> int:
        return self.layer_ends_ns[-1]


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The step raised. The layer counter stands where it stopped until the next step begins."""

    step: int
    reason: str
    message: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag=2):
    spec: EngineSpec


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """How far loading is: what is being done now, and the share of the whole that is behind it, 0 to 1."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=4):
    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    status: str
    reason: str
    message: str


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Hand the cache and the layer counter to the agent that listens on `handoff_path`; replaces a former agent."""

    handoff_path: str
    session: int


class Attached(msgspec.Struct, frozen=True, array_like=True, tag=6):
    session: int


class AttachRefused(msgspec.Struct, frozen=True, array_like=True, tag=7):
    session: int
    reason: str
    message: str


class AgentLost(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The hand-off connection of this session has ended: its agent is gone or has dropped the session."""

    session: int


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks the process about itself, for diagnosis."""


class Inspection(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Top-level Python packages in the process, its sequences, and the layer counter."""

    packages: tuple[str, ...]
    sequences: tuple[int, ...]
    counter: int


ToModel: TypeAlias = StepPlan | Load | Attach | Inspect
FromModel: TypeAlias = (
    StepResult | StepFailed | Loading | Ready | LoadFailed | Attached | AttachRefused | AgentLost | Inspection
)


class FinishReason(enum.Enum):
    """Why a sequence left the scheduler."""

    STOP = "stop"  # a stop token was drawn
    LENGTH = "length"  # max_tokens were drawn
    PREFILLED = "prefilled"  # prefill-only: all prompt tokens but the last are in the cache
    CANCELLED = "cancelled"
    FAILED = "failed"  # a step with it failed
