"""How one rank hands its cache and layer counter to the agent of its node."""

from __future__ import annotations

from baton_engine.executor import Executor
from baton_engine.messages import EngineInfo, EngineSpec
from baton_memory import Handoff, HandoffConnection, hand_over

# An agent that is up answers within milliseconds once it has mapped the memory; meanwhile no step runs.
_TIMEOUT_S = 10.0


def offer_of(executor: Executor, info: EngineInfo, spec: EngineSpec, session: int) -> Handoff:
    """What the rank offers. Its number runs through the whole worker, over all its data-parallel engines."""
    layout = {
        "order": info.order,
        "layers": info.layers,
        "pages": info.pages,
        "page_size": info.page_size,
        "kv_heads": executor.layout.kv_heads,
        "kv_heads_total": info.kv_heads,
        "head_dim": info.head_dim,
        "element_size": info.element_size,
        "dtype": info.dtype,
    }
    return Handoff(
        session,
        spec.dp_rank * spec.ranks + spec.rank,
        spec.ranks * spec.data_parallel,
        layout,
        [executor.memory.region("kv")],
        spec.data_parallel,
    )


def offer_cache(
    executor: Executor, info: EngineInfo, spec: EngineSpec, handoff_path: str, session: int
) -> HandoffConnection:
    """Raises what `hand_over` raises."""
    return hand_over(
        handoff_path,
        offer_of(executor, info, spec, session),
        [executor.memory.fd],
        executor.counter.memory_fd,
        executor.counter.doorbell_fd,
        timeout=_TIMEOUT_S,
    )
