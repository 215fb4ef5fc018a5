"""What of the models and the engine needs a GPU: the checks of gpu_check.py that compute with torch and FlashInfer.

Each compares what the GPU gives with what the CPU gives in float32 from the same numbers, and allows it as much error
as the CPU makes in the GPU's dtype, times `SLACK`: a limit that follows the sizes, and that no wrong page passes.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from baton_engine.client import EngineClient
from baton_engine.distributed_group import DistributedGroup
from baton_engine.executor import Executor, cache_layout
from baton_engine.gpu_place import DeviceTorch, TorchCuda, open_gpu_place
from baton_engine.gpu_runner import GpuRunner
from baton_engine.gpu_sampler import GpuSampler
from baton_engine.group_memory import make_rendezvous
from baton_engine.messages import EngineSpec, Sampling, SequenceStart, StepItem, StepPlan
from baton_engine.sampler import Draw, sample
from baton_memory.cuda import open_driver
from baton_model.attention.cpu import CpuAttention
from baton_model.batch import ForwardBatch
from baton_model.cache import KvCache, LatentCache, PagedCache, open_cache
from baton_model.layers.latent import LatentHeads
from baton_model.layers.operators import TorchOperators
from baton_model.loaders import load_model
from baton_model.model import Model
from baton_model.platform import Platform, cpu_platform, cuda_platform, flashinfer_platform, open_flashinfer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

SLACK = 4.0
# What FlashInfer has kernels for, and the smallest that are like those of real models.
HEAD_DIM, LATENT, ROPE = 64, 512, 64


class Failed(Exception):
    """A check did not find what it must."""


class Skipped(Exception):
    """A check can't be made here, which is no fault."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


@dataclass(frozen=True)
class Rig:
    """What computes. `api`: something in the place of cuda-bindings."""

    device: torch.device
    kernels: Any
    dtype: torch.dtype
    through: DeviceTorch
    api: Any = None

    @property
    def dtype_name(self) -> Literal["float32", "bfloat16"]:
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def platform(self) -> Platform:
        return flashinfer_platform(self.kernels, self.device, (self.dtype,))


def cuda_rig(ordinal: int) -> Rig:
    """Raises DeviceUnavailable."""
    platform = cuda_platform(ordinal)
    return Rig(platform.device, open_flashinfer(), torch.bfloat16, TorchCuda(ordinal))


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square, as a share of that of what is exact."""
    difference = found.detach().cpu().double() - exact.double()
    return float(difference.square().mean().sqrt() / exact.double().square().mean().sqrt())


def compare(found: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, what: str) -> float:
    """`exact`: in float32 on the CPU; `rounded`: in the GPU's dtype on the CPU. The error as a share of what may be."""
    allowed = SLACK * max(error_of(rounded, exact), 1e-5)
    error = error_of(found, exact)
    expect(math.isfinite(error) and error <= allowed, f"{what}: error {error:.2e}, allowed are {allowed:.2e}")
    return error / allowed


# --- kernels ----------------------------------------------------------------------------------------------------------


def check_operators(rig: Rig) -> str:
    ours, theirs = rig.platform().operators, TorchOperators()
    torch.manual_seed(0)
    x, weight = torch.randn(33, 1024).to(rig.dtype), torch.randn(1024).to(rig.dtype)
    there, weight_there = x.to(rig.device), weight.to(rig.device)
    norm = compare(
        ours.rms_norm(there, weight_there, 1e-5),
        theirs.rms_norm(x.float(), weight.float(), 1e-5),
        theirs.rms_norm(x, weight, 1e-5),
        "rms_norm",
    )
    gate = compare(ours.silu_and_mul(there), theirs.silu_and_mul(x.float()), theirs.silu_and_mul(x), "silu_and_mul")
    return f"rms_norm and silu_and_mul: {norm:.0%} and {gate:.0%} of the error that is allowed"


def check_sampler(rig: Rig) -> str:
    torch.manual_seed(0)
    logits, count = torch.randn(64, 32_000) * 3, 64
    there, draw = logits.to(rig.device), GpuSampler(rig.kernels)
    plain = [Draw(Sampling(temperature=(row % 4) / 2, seed=row), row) for row in range(count)]
    same = sum(a == b for a, b in zip(draw(there, plain)[0], sample(logits, plain)[0], strict=True))
    expect(same >= count - 2, f"{count - same} of {count} draws without truncation are not the CPU's")
    cut = [Draw(Sampling(top_k=8, top_p=0.9, seed=row), 1) for row in range(count)]
    tokens = draw(there, cut)[0]
    best = logits.topk(8).indices
    expect(
        all(token in best[row] for row, token in enumerate(tokens)), "a token outside the best 8 was drawn with top_k 8"
    )
    alone = [draw(there[row : row + 1], cut[row : row + 1])[0][0] for row in range(0, count, 7)]
    expect(alone == list(tokens[::7]), "a row draws otherwise alone than in a batch")
    seen = {draw(there[:1], [Draw(Sampling(seed=seed), 0)])[0][0] for seed in range(16)}
    expect(len(seen) > 1, "16 seeds draw the same token")
    return f"{same} of {count} draws as on the CPU, truncated ones inside, each the same alone and in a batch"


def sequences_of(kind: str) -> list[tuple[int, int]]:
    """Tokens before, and new ones."""
    return {
        "decodes": [(0, 1), (15, 1), (16, 1), (100, 1), (333, 1)],
        "prompts": [(0, 40), (0, 129), (0, 1)],
        "a mix": [(0, 77), (31, 1), (16, 40), (200, 1)],
    }[kind]


def batch_of(sequences: Sequence[tuple[int, int]], page_size: int) -> tuple[ForwardBatch, int]:
    """Over shuffled pages, and how many there are."""
    needed = [-(-(past + new) // page_size) for past, new in sequences]
    pages = torch.randperm(sum(needed) + 3).tolist()
    tables = [[pages.pop() for _ in range(count)] for count in needed]
    return ForwardBatch.build([([0] * new, past) for past, new in sequences], tables), sum(needed) + 3


def in_three(cache: Callable[[torch.dtype, torch.device], PagedCache], rig: Rig) -> list[PagedCache]:
    """On the GPU, exact on the CPU, and in the GPU's dtype on the CPU, with the same entries."""
    places = [(rig.dtype, rig.device), (torch.float32, torch.device("cpu")), (rig.dtype, torch.device("cpu"))]
    caches = [cache(dtype, device) for dtype, device in places]
    start = torch.randn(caches[0].tensor.shape).to(rig.dtype)
    for each in caches:
        each.tensor.copy_(start)
    return caches


def buffer(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(elements * dtype.itemsize, dtype=torch.uint8, device=device)


def check_attention(rig: Rig) -> str:
    torch.manual_seed(0)
    worst, page_size, tried = 0.0, 16, 0
    backend = rig.platform().attention
    for order in ("HND", "NHD"):
        for kind, heads, kv_heads in (("decodes", 9, 3), ("prompts", 8, 1), ("a mix", 6, 6), ("decodes", 32, 4)):
            batch, pages = batch_of(sequences_of(kind), page_size)

            def cache(
                dtype: torch.dtype,
                device: torch.device,
                order: Any = order,
                pages: int = pages,
                kv_heads: int = kv_heads,
            ) -> PagedCache:
                return KvCache(
                    buffer(2 * pages * 2 * page_size * kv_heads * HEAD_DIM, dtype, device),
                    order=order,
                    layers=2,
                    pages=pages,
                    page_size=page_size,
                    kv_heads=kv_heads,
                    head_dim=HEAD_DIM,
                    dtype=dtype,
                )

            tokens = len(batch.token_ids)
            queries = torch.randn(tokens, heads, HEAD_DIM).to(rig.dtype)
            entries = torch.randn(tokens, 2, kv_heads, HEAD_DIM).to(rig.dtype)
            caches = in_three(cache, rig)
            outputs = []
            for each, attention in zip(caches, (backend, CpuAttention(), CpuAttention()), strict=True):
                place = {"device": each.tensor.device, "dtype": each.dtype}
                assert isinstance(each, KvCache)
                step = attention.plan(batch.on(each.tensor.device), each)
                outputs.append(step(1, queries.to(**place), entries.to(**place)))
            what = f"{kind}, {heads} heads over {kv_heads}, {order}"
            worst = max(worst, compare(outputs[0], outputs[1], outputs[2], what))
            expect(torch.equal(caches[0].tensor[1].cpu(), caches[2].tensor[1]), f"{what}: the cache holds other bytes")
            tried += 1
    return f"{tried} batches: at most {worst:.0%} of the error that is allowed, and the same bytes in the cache"


def check_latent_attention(rig: Rig) -> str:
    torch.manual_seed(0)
    worst, page_size, heads = 0.0, 16, 16
    backend = rig.platform().attention
    for kind in ("decodes", "a mix"):
        batch, pages = batch_of(sequences_of(kind), page_size)

        def cache(dtype: torch.dtype, device: torch.device, pages: int = pages) -> PagedCache:
            width = LATENT + ROPE
            memory = buffer(2 * pages * page_size * width, dtype, device)
            return LatentCache(memory, layers=2, pages=pages, page_size=page_size, width=width, dtype=dtype)

        tokens = len(batch.token_ids)
        queries = torch.randn(tokens, heads, 128 + ROPE).to(rig.dtype)
        entries = torch.randn(tokens, LATENT + ROPE).to(rig.dtype)
        sizes = (heads, 128, LATENT), (heads, LATENT, 128)
        projections = [(torch.randn(*size) / size[1] ** 0.5).to(rig.dtype) for size in sizes]
        caches, outputs = in_three(cache, rig), []
        for each, attention in zip(caches, (backend, CpuAttention(), CpuAttention()), strict=True):
            place = {"device": each.tensor.device, "dtype": each.dtype}
            up = LatentHeads(*(projection.to(**place) for projection in projections), (128 + ROPE) ** -0.5)
            assert isinstance(each, LatentCache)
            step = attention.plan_latent(batch.on(each.tensor.device), each)
            outputs.append(step(1, queries.to(**place), entries.to(**place), up))
        worst = max(worst, compare(outputs[0], outputs[1], outputs[2], kind))
        expect(torch.equal(caches[0].tensor[1].cpu(), caches[2].tensor[1]), f"{kind}: the cache holds other bytes")
    return f"decodes and a mix: at most {worst:.0%} of the error that is allowed, and the same bytes in the cache"


# --- models -----------------------------------------------------------------------------------------------------------


@contextmanager
def checkpoint(family: str) -> Iterator[Path]:
    """A small random one, of sizes that FlashInfer has kernels for."""
    small_models, small_deepseek = (importlib.import_module(name) for name in ("small_models", "small_deepseek"))
    if family == "deepseek":
        small = small_deepseek.SmallDeepseek(hidden=128, heads=4, rank=LATENT, nope=64, rope=ROPE, value=64)
    else:
        small = small_models.SmallModel(family=family, layers=3, hidden=256, heads=6, kv_heads=2, head_dim=HEAD_DIM)
    with tempfile.TemporaryDirectory() as directory:
        yield small.write_hugging_face(Path(directory) / family)


CHUNK, PROMPT, DECODES = 20, 37, 8


def compare_rows(found: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, what: str) -> float:
    """As `compare`, but of the median row, of each chunk and of the decodes: in another dtype a token now and then goes
    to another expert, which is no fault, and makes an error of the size of what is computed."""

    def errors(of: torch.Tensor) -> list[float]:
        rows = [error_of(row, true) for row, true in zip(of.detach().cpu(), exact, strict=True)]
        return [statistics.median(part) for part in (rows[:CHUNK], rows[CHUNK:PROMPT], rows[PROMPT:])]

    worst = 0.0
    for error, usual in zip(errors(found), errors(rounded), strict=True):
        allowed = SLACK * max(usual, 1e-5)
        expect(math.isfinite(error) and error <= allowed, f"{what}: error {error:.2e}, allowed are {allowed:.2e}")
        worst = max(worst, error / allowed)
    return worst


def logits_of(model: Model) -> torch.Tensor:
    """Of a prompt in two chunks, then of decodes; `[PROMPT + DECODES, vocabulary]`."""
    shape, device = model.cache_shape, model.device
    pages, page_size = 8, 16
    elements = shape.layers * pages * page_size * shape.kv_heads * shape.head_dim * (1 if shape.latent else 2)
    cache = open_cache(
        buffer(elements, model.dtype, device), shape, order="HND", pages=pages, page_size=page_size, dtype=model.dtype
    )
    tokens = torch.randint(4, 60, (PROMPT + DECODES,), generator=torch.Generator().manual_seed(1)).tolist()
    rows, start = [], 0
    for size in (CHUNK, PROMPT - CHUNK, *[1] * DECODES):
        batch = ForwardBatch.build([(tokens[start : start + size], start)], [[5, 2, 7]], device)
        rows.append(model.logits(model.forward(batch, cache)))
        start += size
    return torch.cat(rows)


def check_families(rig: Rig) -> str:
    shares = []
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek"):
        with checkpoint(family) as path:
            found = logits_of(load_model(path, rig.dtype_name, rig.platform()))
            exact = logits_of(load_model(path, "float32", cpu_platform()))
            rounded = logits_of(load_model(path, rig.dtype_name, cpu_platform()))
        shares.append(f"{family} {compare_rows(found, exact, rounded, family):.0%}")
    return f"logits of chunks and decodes, share of the error that is allowed: {', '.join(shares)}"


# --- a rank -----------------------------------------------------------------------------------------------------------


@contextmanager
def executor_of(rig: Rig, path: Path, graph_batch: int) -> Iterator[Executor]:
    platform = rig.platform()
    model = load_model(path, rig.dtype_name, platform)
    runner = GpuRunner(model, path.name, "check", platform.attention, graph_batch=graph_batch)
    spec = EngineSpec(model_path=str(path), dtype=rig.dtype_name, pages=64, page_size=16, max_batch=max(graph_batch, 1))
    layout = cache_layout(spec, runner.facts)
    place = open_gpu_place(layout.region_bytes, rig.through, driver=open_driver(rig.api), kernels=rig.kernels)
    with closing(place.memory):
        executor = Executor(runner, layout, place=place)
        executor.warm_up()
        yield executor


def run_steps(executor: Executor, tokens: Sequence[Sequence[int]], steps: int) -> list[torch.Tensor]:
    """Sequences of different lengths; then so many decodes of given tokens, so that no draw can drift. Logits."""
    found: list[torch.Tensor] = []
    forward = executor._runner.forward

    def watched(*arguments: Any) -> torch.Tensor:
        found.append(forward(*arguments).float().cpu())
        return found[-1].to(executor._place.buffer.device)

    lengths = [3 + 20 * row for row in range(len(tokens))]
    starts = tuple(
        SequenceStart(row, tuple(range(1 + row * 8, 9 + row * 8)), Sampling(temperature=0))
        for row in range(len(tokens))
    )
    executor._runner.forward = watched  # type: ignore[method-assign]
    for step in range(steps):
        items = []
        for row, (sequence, length) in enumerate(zip(tokens, lengths, strict=True)):
            start = 0 if step == 0 else length + step - 1
            items.append(StepItem(row, start, tuple(sequence[start : length + step]), True, step == 0))
        executor.run(StepPlan(step, tuple(items), starts if step == 0 else ()), 0)
    return found


def check_graphs(rig: Rig) -> str:
    layers, steps = 3, 12
    tokens = torch.randint(4, 60, (3, 100), generator=torch.Generator().manual_seed(2)).tolist()
    with checkpoint("llama") as path:
        with executor_of(rig, path, 0) as eager:
            expected = run_steps(eager, tokens, steps)
        with executor_of(rig, path, 4) as graphed:
            found = run_steps(graphed, tokens, steps)
            counted = graphed.counter.value()
    expect(counted == steps * layers, f"the layer counter stands at {counted} after {steps} steps of {layers} layers")
    worst = max(error_of(a, b) for a, b in zip(found, expected, strict=True))
    # Another size of batch may round otherwise; a wrong page makes an error of the size of the logits.
    expect(worst < 0.05, f"logits with graphs differ from those without by {worst:.1%}")
    return f"3 sequences in graphs of 4, {steps} steps: within {worst:.2%} of the logits without, all layers counted"


def check_counter_is_seen_layer_by_layer(rig: Rig) -> str:
    """While one graph is replayed, the host reads the counter in a loop."""
    if rig.device.type != "cuda":
        raise Skipped("without a GPU a replay is over before anybody can look")
    with checkpoint("llama") as path, executor_of(rig, path, 1) as executor:
        place = executor._place
        seen: list[int] = []
        batch = executor._batch
        start = SequenceStart(0, (1, 2, 3, 4), Sampling(temperature=0))
        executor.run(StepPlan(0, (StepItem(0, 0, tuple(range(4, 14)), True, True),), (start,)), 0)
        for step in range(1, 30):
            plan = StepPlan(step, (StepItem(0, 9 + step, (5,), True, False),))
            place.begin(step * 3)
            executor._runner.forward(batch(plan), lambda layer: None)
            deadline = time.monotonic() + 5
            while (value := place.counter.value()) < (step + 1) * 3 and time.monotonic() < deadline:
                if not seen or seen[-1] != value:
                    seen.append(value)
            seen.append(place.counter.value())
            place.finish()
        expect(seen == sorted(seen), "the counter went back")
        expect(seen[-1] == 90, f"the counter stands at {seen[-1]}, not at 90")
    between = len({value for value in seen if value % 3})
    return f"29 replays of 3 layers: it never went back, and the host saw {between} of 58 values between steps"


def check_ranks(rig: Rig) -> str:
    """One process: what a machine with one GPU can show of NCCL. With more, `baton up --device cuda` shows the rest."""
    if rig.device.type != "cuda":
        raise Skipped("NCCL is of GPUs")
    group = DistributedGroup(make_rendezvous(), 0, 1, device=rig.device, patience_s=30)
    group.meet()
    x = torch.arange(12.0, device=rig.device).view(3, 4).to(rig.dtype)
    expect(torch.equal(group.all_reduce(x.clone()), x), "a sum over one rank changed the numbers")
    expect(torch.equal(group.all_gather(x), x), "a gather over one rank changed the numbers")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed = group.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    expect(torch.equal(summed, x), "a captured sum changed the numbers")
    return f"NCCL met through a nameless file, summed, gathered, captured; {torch.cuda.device_count()} GPUs here"


# --- speed ------------------------------------------------------------------------------------------------------------


def check_speed(rig: Rig) -> str:
    """Through a model process, as a worker runs it: the default model, or a random one of a like size."""
    if rig.device.type != "cuda":
        raise Skipped("of a GPU")
    lines = []
    with ExitStack() as cleanup:
        path = cleanup.enter_context(model_for_speed())
        for graphs in (True, False):
            spec = EngineSpec(
                model_path=str(path), dtype="bfloat16", device="cuda", graphs=graphs, kv_bytes=4 << 30, max_batch=32
            )
            lines.append(f"{'CUDA graphs' if graphs else 'without them'}: {asyncio.run(measure(spec))}")
    return "\n    ".join([path.name, *lines])


@contextmanager
def model_for_speed() -> Iterator[Path]:
    try:
        yield importlib.import_module("reference_model").default_model_path()
    except (ImportError, AssertionError):
        small_models = importlib.import_module("small_models")
        small = small_models.SmallModel(
            layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, context=8192
        )
        with tempfile.TemporaryDirectory() as directory:
            yield small.write_hugging_face(Path(directory) / "random-135M")


async def measure(spec: EngineSpec) -> str:
    start = time.monotonic()
    client = await EngineClient.start(spec, timeout_s=100)
    try:
        found, step, number = [f"started in {time.monotonic() - start:.1f} s"], 0, 0

        async def run(batch: int, prompt: int, steps: int) -> tuple[float, float]:
            """Seconds of the prompts' step, and of a decode step."""
            nonlocal step, number
            greedy, each = Sampling(temperature=0), -(-(prompt + steps) // client.info.page_size)
            ids = range(number, number + batch)
            starts = tuple(
                SequenceStart(id_, tuple(range(row * each, (row + 1) * each)), greedy) for row, id_ in enumerate(ids)
            )
            items = tuple(StepItem(id_, 0, tuple(4 + place % 50 for place in range(prompt)), True, True) for id_ in ids)
            begin = time.monotonic()
            await client.step(StepPlan(step, items, starts, tuple(range(number))))
            prefilled = time.monotonic() - begin
            begin = time.monotonic()
            for token in range(steps):
                items = tuple(StepItem(id_, prompt + token, (5,), True, False) for id_ in ids)
                await client.step(StepPlan(step + 1 + token, items))
            step, number = step + 1 + steps, number + batch
            return prefilled, (time.monotonic() - begin) / steps

        for batch in (1, 1, 8, 32):
            _, decode = await run(batch, 40, 50)
        found.append(f"decode at 32: {32 / decode:,.0f} tokens/s, {decode * 1000:.2f} ms a step")
        _, decode = await run(8, 40, 50)
        found.append(f"at 8: {8 / decode:,.0f}, {decode * 1000:.2f} ms")
        await run(1, 2000, 4)
        prefill, decode = await run(1, 2000, 50)
        found.append(f"at 1 and 2,000: {1 / decode:,.0f}, {decode * 1000:.2f} ms")
        found.append(f"prefill of 2,000: {2000 / prefill:,.0f} tokens/s")
        return "; ".join(found)
    finally:
        await client.stop()
