"""When rank 0's layer counter passes a layer, every rank has written it, however slow it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from baton_engine.messages import EngineSpec, SequenceStart, StepItem, StepPlan
from engine_threads import ThreadEngine
from small_deepseek import SmallDeepseek
from small_models import SmallCheckpoint, SmallModel

PROMPT = tuple(range(3, 15))
PAGES = (5, 2, 7)
STEP = 4


class Sums:
    """How many sums each rank has joined."""

    def __init__(self, engine: ThreadEngine) -> None:
        self.joined = [0] * len(engine.groups)
        self.changed = threading.Condition()
        for group in engine.groups:
            self._count(group)

    def _count(self, group: object) -> None:
        inner = group.all_reduce  # type: ignore[attr-defined]

        def all_reduce(x: object) -> object:
            with self.changed:
                self.joined[group.rank] += 1  # type: ignore[attr-defined]
                self.changed.notify_all()
            return inner(x)

        group.all_reduce = all_reduce  # type: ignore[attr-defined]

    def wait_until_awaited(self, rank: int) -> None:
        """Until rank 0 is in a sum that this rank has not joined."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.joined[0] > self.joined[rank], 20)


@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize(
    "model", [SmallModel(heads=6, kv_heads=3), SmallDeepseek(dense_layers=2)], ids=["heads", "latent"]
)
def test_a_slow_rank_holds_the_counter_back(model: SmallCheckpoint, slow: int, tmp_path: Path) -> None:
    engine = ThreadEngine(EngineSpec(model_path=str(model.write_hugging_face(tmp_path)), pages=8, page_size=4, ranks=3))
    lead, late = engine.executors[0], engine.executors[slow]
    layers, sums = late.layout.layers, Sums(engine)
    model_of_late = late._runner._model  # type: ignore[attr-defined]
    plan, advance = model_of_late.plan, lead.counter.advance
    at_write: list[int] = []
    at_advance: dict[int, list[bytes]] = {}

    def plan_late(*arguments: object) -> object:
        attend = plan(*arguments)

        def attend_late(layer: int, *arguments: object) -> object:
            sums.wait_until_awaited(slow)
            at_write.append(lead.counter.value())
            return attend(layer, *arguments)

        return attend_late

    def held(layer: int) -> list[bytes]:
        size, buffer = late.layout.page_bytes, late.memory.buffer
        starts = [late.layout.page_offset(layer, page) for page in PAGES]
        return [bytes(buffer[start : start + size]) for start in starts]

    def advance_and_look(value: int) -> None:
        if value > STEP * layers:
            at_advance[value] = held(value - STEP * layers - 1)
        advance(value)

    model_of_late.plan, lead.counter.advance = plan_late, advance_and_look
    before = [held(layer) for layer in range(layers)]
    start = SequenceStart(1, PAGES, None)
    engine.run(StepPlan(STEP, (StepItem(1, 0, PROMPT, False, True),), (start,)))
    # Layer by layer: when the slow rank writes one, the counter has passed those before it only.
    assert at_write == [STEP * layers + layer for layer in range(layers)]
    assert list(at_advance) == [STEP * layers + layer + 1 for layer in range(layers)]
    assert list(at_advance.values()) == [held(layer) for layer in range(layers)]
    assert all(before[layer] != held(layer) for layer in range(layers))
    assert all(executor.counter.value() == 0 for executor in engine.executors[1:])
    engine.close()
