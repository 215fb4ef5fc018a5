"""A rank on a GPU, with the host in its place: the same tokens, cache and layer counter as on the CPU."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
import torch

from baton_engine.baton_runner import load_model
from baton_engine.errors import EngineError, NonFiniteLogits, SpecInvalid
from baton_engine.executor import Executor, cache_layout
from baton_engine.group_memory import open_group
from baton_engine.messages import EngineSpec, Sampling, SequenceStart, StepItem, StepPlan
from baton_engine.place import gpu_of
from baton_model.errors import DeviceUnavailable
from baton_model.parallel import Solo
from host_as_gpu import StreamGpu, gpu_place, gpu_runner
from small_models import SmallModel

LAYERS, BATCH = 3, 3
GREEDY, WARM = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return SmallModel(layers=LAYERS).write_hugging_face(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stack():
    with ExitStack() as cleanup:
        yield cleanup


@pytest.fixture
def spec(checkpoint) -> EngineSpec:
    return EngineSpec(model_path=str(checkpoint), pages=12, page_size=4, max_batch=BATCH)


def run(executor: Executor, sequences: dict[int, tuple[list[int], Sampling | None]], steps: int) -> list:
    """Prompts in one step, then decodes; a sequence without sampling is a prefill for another worker."""
    known = {number: list(tokens) for number, (tokens, _) in sequences.items()}
    done = dict.fromkeys(known, 0)
    results = []
    for step in range(steps):
        alive = [number for number, (_, sampling) in sequences.items() if sampling is not None or step == 0]
        items = [
            StepItem(
                number,
                done[number],
                tuple(known[number][done[number] :]),
                sequences[number][1] is not None,
                step == 0,
            )
            for number in alive
        ]
        starts = tuple(
            SequenceStart(number, tuple(range(number * 3, number * 3 + 3)), sampling)
            for number, (_, sampling) in sequences.items()
        )
        result = executor.run(StepPlan(step, tuple(items), starts if step == 0 else ()), 0)
        results.append(result)
        drawn = iter(result.token_ids)
        for item in items:
            done[item.sequence_id] = item.end
            if item.sample:
                known[item.sequence_id].append(next(drawn))
    return results


@pytest.mark.parametrize("graph_batch", [BATCH, 0], ids=["graphs", "no graphs"])
def test_it_draws_the_same_tokens_into_the_same_pages_and_counts_every_layer(spec, checkpoint, stack, graph_batch):
    reference = load_model(spec, lambda stage, fraction: None)
    layout = cache_layout(spec, reference.facts)
    on_cpu = Executor(reference, layout)
    gpu = StreamGpu()
    place = stack.enter_context(gpu_place(layout.region_bytes, gpu))
    on_gpu = Executor(gpu_runner(checkpoint, graph_batch), layout, place=place)
    sequences = {0: ([5, 6, 7], GREEDY), 1: ([9], WARM), 2: ([1, 2, 3, 4, 5, 6], None)}
    for executor in (on_cpu, on_gpu):
        executor.warm_up()
    gpu.stored.clear()
    expected, found = (run(executor, sequences, 5) for executor in (on_cpu, on_gpu))
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    caches = [torch.frombuffer(on_cpu.memory.buffer, dtype=torch.float32), place.buffer.view(torch.float32)]
    # Where the passes before the first step wrote differs.
    caches = [cache.view(LAYERS, 12, -1)[:, 1:] for cache in caches]
    torch.testing.assert_close(*caches, atol=1e-5, rtol=1e-5)
    # Every layer of every step, in order, whether launched or replayed.
    assert gpu.stored == list(range(1, 5 * LAYERS + 1))
    assert on_gpu.counter.value() == 5 * LAYERS
    assert all(len(each.layer_ends_ns) == LAYERS for each in found)


def test_the_counter_of_a_rank_that_does_not_lead_stands_still(spec, checkpoint, stack):
    runner = gpu_runner(checkpoint, BATCH)
    layout = cache_layout(spec, runner.facts)
    gpu = StreamGpu()
    place = stack.enter_context(gpu_place(layout.region_bytes, gpu, leads=False))
    Executor(runner, layout, place=place).warm_up()
    place.begin(30)
    place.on_layer(1)
    assert place.counter.value() == 0
    assert not gpu.stored


def test_a_step_that_failed_is_passed_over(spec, checkpoint, stack, monkeypatch):
    runner = gpu_runner(checkpoint, 0)
    layout = cache_layout(spec, runner.facts)
    place = stack.enter_context(gpu_place(layout.region_bytes, StreamGpu()))
    executor = Executor(runner, layout, place=place)

    def fails(*_):
        raise EngineError("as asked")

    start = SequenceStart(0, (1, 2, 3), GREEDY)
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="as asked"):
        patch.setattr(runner, "forward", fails)
        executor.run(StepPlan(4, (StepItem(0, 0, (1, 2), True, True),), (start,)), 0)
    assert executor.counter.value() == 4 * LAYERS
    executor.run(StepPlan(5, (StepItem(0, 0, (1, 2), True, True),)), 0)
    assert executor.counter.value() == 6 * LAYERS


class Group(Solo):
    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def abort(self) -> None:
        self._happened.append("aborted")


def test_a_failed_step_is_told_only_when_the_device_is_done_with_what_was_queued(spec, checkpoint, stack, monkeypatch):
    """The pages are somebody else's from then on, and other ranks may be what the device waits for."""
    runner, gpu, happened = gpu_runner(checkpoint, 0), StreamGpu(), []
    layout = cache_layout(spec, runner.facts)
    place = stack.enter_context(gpu_place(layout.region_bytes, gpu))
    executor = Executor(runner, layout, Group(happened), place)

    def fails(batch, on_layer):
        on_layer(0)
        happened.append("queued")
        raise EngineError("as asked")

    def finish():
        happened.append("done")
        raise RuntimeError("the device is broken, too")

    monkeypatch.setattr(runner, "forward", fails)
    monkeypatch.setattr(place, "finish", finish)
    with pytest.raises(EngineError, match="as asked"):
        executor.run(StepPlan(0, (StepItem(0, 0, (1, 2), True, True),), (SequenceStart(0, (1,), GREEDY),)), 0)
    assert happened == ["queued", "aborted", "done"]


def test_tokens_that_cannot_be_drawn_are_no_failure_of_the_group(spec, checkpoint, monkeypatch):
    """No rank waits for another any more."""
    runner, happened = load_model(spec, lambda *_: None), []
    executor = Executor(runner, cache_layout(spec, runner.facts), Group(happened))
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda *given: forward(*given) * float("nan"))
    with pytest.raises(NonFiniteLogits):
        executor.run(StepPlan(0, (StepItem(0, 0, (1, 2), True, True),), (SequenceStart(0, (1,), GREEDY),)), 0)
    assert happened == []


def test_each_rank_of_the_worker_has_the_gpu_of_its_number(spec):
    ranks = [(dp_rank, rank) for dp_rank in range(2) for rank in range(3)]
    gpus = [gpu_of(_replace(spec, dp_rank=dp_rank, rank=rank, ranks=3)) for dp_rank, rank in ranks]
    assert gpus == list(range(6))
    assert gpu_of(_replace(spec, rank=1, ranks=2, gpus=(7, 5))) == 5
    with pytest.raises(SpecInvalid, match="gpus names 1 GPUs; the worker has 2 ranks"):
        gpu_of(_replace(spec, ranks=2, gpus=(7,)))


def test_ranks_on_gpus_meet_in_an_empty_file(spec):
    with open_group(_replace(spec, ranks=2, device="cuda")) as fd:
        assert fd is not None
    with open_group(_replace(spec, ranks=1, device="cuda")) as fd:
        assert fd is None


def test_without_a_gpu_loading_says_so(spec):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceUnavailable) as caught:
        load_model(_replace(spec, device="cuda", dtype="bfloat16"), lambda stage, fraction: None)
    assert caught.value.status == "FAILED_PRECONDITION"


def _replace(spec: EngineSpec, **changes) -> EngineSpec:
    return msgspec.structs.replace(spec, **changes)
