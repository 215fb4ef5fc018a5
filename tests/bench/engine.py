"""Baton's engine on one core against llama.cpp and transformers, on the default model.

All engines are processes of their own, bound to the same core, one thread each, and take turns (A B C A B C). Time is
CPU time of the process: what others do on the machine then counts only through the caches and the memory. Baton's
engine is the model process as a worker starts it, driven over its socket by a scheduler; what it takes includes
messages and sampling. llama.cpp runs the file's own quantisation (Q4_1); it is compiled for this processor, once and
for many minutes, in an environment of its own under build/, unless its recorded figures are to do.

vLLM's CPU build (0.32, bfloat16, eager) is too large to install here: its figures were measured on one core of the same
kind of machine, and nothing is scaled. The machine's own speed is printed, so that figures can be compared.

    python tests/bench/engine.py [--rounds 5] [--cpu 0] [--recorded-llama]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report
from engine_side import CHUNK, STEPS, prompt
from line_processes import BUILD, LineProcess, cpu_seconds

from baton_engine.client import EngineClient
from baton_engine.messages import Dtype, EngineSpec, Quantization, Sampling
from baton_engine.scheduler import Scheduler
from engine_driver import GREEDY, Driver
from reference_model import default_model_path

# vLLM: tokens a second of a prompt of 2,048, and milliseconds of a decode step; the middle of what was seen.
VLLM_PREFILL = 277.0
VLLM_DECODE = 46.0
VLLM_DECODE_BATCH = 72.0
# What llama.cpp did on the same machine, for when it can't be installed.
LLAMA_PREFILL = 107.0
LLAMA_DECODE = 28.0

PAGES = 640
LLAMA = "llama-cpp-python==0.3.36"
VENV = BUILD / "llama"

Measure = Callable[[], Awaitable[float]]


class BatonEngine:
    """One model process. `start_s`: CPU seconds from its birth until it was ready."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.start_s = client, cpu_seconds(client.info.pid)
        self.driver = Driver(client, chunk_tokens=CHUNK)
        self.resident = resident_bytes(client.info.pid) - cache_bytes(client)

    @classmethod
    async def start(cls, dtype: Dtype, quantization: Quantization, cpu: int) -> BatonEngine:
        spec = EngineSpec(
            model_path=str(default_model_path()),
            dtype=dtype,
            quantization=quantization,
            pages=PAGES,
            cpus=(cpu,),
            chunk_s=0.5,
        )
        return cls(await EngineClient.start(spec))

    async def prefill(self, tokens: int) -> float:
        """CPU seconds of a prompt and the first token."""
        before = cpu_seconds(self.client.info.pid)
        await self.driver.run([self.driver.sequence(prompt(tokens), max_tokens=1)])
        return cpu_seconds(self.client.info.pid) - before

    async def decode(self, tokens: int, batch: int, sampling: Sampling = GREEDY) -> float:
        """CPU seconds of a step of `batch` sequences behind `tokens` tokens each."""
        return (await self.steps(tokens, batch, sampling))[0]

    async def overhead(self, tokens: int, batch: int, sampling: Sampling) -> float:
        """Seconds of a step outside the forward pass: scheduling, both messages, sampling."""
        return (await self.steps(tokens, batch, sampling))[1]

    async def steps(self, tokens: int, batch: int, sampling: Sampling) -> tuple[float, float]:
        """Over steps of nothing but decodes: the median's CPU seconds, and the quickest's seconds outside the forward
        pass, of which there is no CPU time to be had: two processes take turns there, and wait for a CPU in between."""
        scheduler: Scheduler = self.driver.scheduler
        for _ in range(batch):
            scheduler.add(self.driver.sequence(prompt(tokens), max_tokens=STEPS + 8, sampling=sampling))
        used, outside = [], []
        while True:
            before, begin = cpu_seconds(self.client.info.pid), time.monotonic_ns()
            plan = scheduler.next_step()
            if plan is None:
                break
            result = await self.client.step(plan)
            scheduler.complete(result)
            end = time.monotonic_ns()
            if len(plan.items) == batch and not plan.prefills:
                used.append(cpu_seconds(self.client.info.pid) - before)
                outside.append((end - begin - (result.forwarded_ns - result.forward_ns)) / 1e9)
        return statistics.median(used), min(outside)


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def cache_bytes(client: EngineClient) -> int:
    """Resident pages of the cache's memfd, all of which may not have been touched yet."""
    total, counting = 0, False
    for line in Path(f"/proc/{client.info.pid}/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            counting = "baton-kv" in line
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def llama_python() -> Path | str:
    """The interpreter that has llama.cpp, installed if need be; or why there is none."""
    python = VENV / "bin" / "python"
    steps = [
        [sys.executable, "-m", "venv", str(VENV)],
        [str(python), "-m", "pip", "install", "--quiet", LLAMA],
    ]
    check = [str(python), "-c", "import llama_cpp"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return python
    for step in [*steps, check]:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{LLAMA} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return python


def side(python: Path | str, kind: str, cpu: int) -> LineProcess:
    program = ("taskset", "-c", cpu, python, Path(__file__).with_name("engine_side.py"), kind, default_model_path())
    return LineProcess(*program, pools=[], environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})


def asks(process: LineProcess, line: str) -> Measure:
    async def measure() -> float:
        return float(await asyncio.to_thread(process.call, line))

    return measure


async def by_turns(
    label: str, unit: str, show: Callable[[float], float], rounds: int, who: dict[str, Measure]
) -> dict[str, float]:
    """Median of each, by turns; printed and returned as `show` makes them of seconds."""
    found: dict[str, list[float]] = {name: [] for name in who}
    for _ in range(rounds):
        for name, measure in who.items():
            found[name].append(show(await measure()))
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"  {label:28s} {name:16s} {middle:9.2f} {unit} ({min(values):.2f} to {max(values):.2f})", flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


def machine_speed(cpu: int) -> None:
    """What one core does of the two things that matter."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    size = 1024
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        seconds = min(_timed(lambda a=a, b=b: a @ b) for _ in range(7))
        rates.append(f"{str(dtype).removeprefix('torch.')} {2 * size**3 / seconds / 1e9:.0f} GFLOP/s")
    block = torch.ones(64 << 20)
    seconds = min(_timed(block.sum) for _ in range(5))
    print(f"this core: torch products {', '.join(rates)}; reads {block.nbytes / seconds / 1e9:.1f} GB/s", flush=True)
    os.sched_setaffinity(0, before)


def _timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


async def run(rounds: int, cpu: int, recorded_llama: bool) -> int:
    report = Report()
    machine_speed(cpu)
    llama = "its recorded figures are to do" if recorded_llama else await asyncio.to_thread(llama_python)
    async with AsyncExitStack() as stack:
        engines: dict[str, BatonEngine] = {}
        for name, dtype, quantization in (
            ("float32", "float32", "none"),
            ("bfloat16", "bfloat16", "none"),
            ("int8", "bfloat16", "int8"),
        ):
            engines[name] = await BatonEngine.start(dtype, quantization, cpu)  # type: ignore[arg-type]
            stack.push_async_callback(engines[name].client.stop)
        others: dict[str, LineProcess] = {"transformers": side(sys.executable, "transformers", cpu)}
        if isinstance(llama, Path):
            others["llama.cpp"] = side(llama, "llama.cpp", cpu)
        else:
            report.skip("llama.cpp in the same run", llama)
        for process in others.values():
            stack.callback(process.close)
        for engine in engines.values():
            await engine.prefill(64)

        rates = await by_turns(
            "prefill 2,048",
            "tok/s",
            lambda seconds: 2048 / seconds,
            rounds,
            {name: (lambda each=each: each.prefill(2048)) for name, each in engines.items()}
            | {name: asks(each, "prefill 2048") for name, each in others.items()},
        )
        best, llama_rate = max(rates["float32"], rates["bfloat16"]), rates.get("llama.cpp", LLAMA_PREFILL)
        report.at_least("prefill 2,048, float, over vLLM's 277 tok/s", best / VLLM_PREFILL, 2.0, "x")
        report.at_least(f"prefill 2,048, float, over llama.cpp's {llama_rate:.0f}", best / llama_rate, 4.0, "x")
        report.at_least("prefill 2,048, int8, over vLLM's 277 tok/s", rates["int8"] / VLLM_PREFILL, 4.0, "x")

        def milliseconds(seconds: float) -> float:
            return seconds * 1e3

        times = await by_turns(
            "decode, batch 1 at 2,048",
            "ms",
            milliseconds,
            rounds,
            {name: (lambda each=each: each.decode(2048, 1)) for name, each in engines.items()}
            | {name: asks(each, "decode 2048") for name, each in others.items()},
        )
        llama_time = times.get("llama.cpp", LLAMA_DECODE)
        report.at_most("decode, batch 1 at 2,048, bfloat16, of vLLM's 46 ms", times["bfloat16"] / VLLM_DECODE, 0.9, "x")
        report.at_most(
            f"decode, batch 1 at 2,048, int8, of llama.cpp's {llama_time:.0f} ms", times["int8"] / llama_time, 1.0, "x"
        )

        times = await by_turns(
            "decode, batch 8 at 256",
            "ms",
            milliseconds,
            rounds,
            {name: (lambda each=each: each.decode(256, 8)) for name, each in engines.items()},
        )
        report.at_most(
            "decode, batch 8 at 256, bfloat16, of vLLM's 72 ms", times["bfloat16"] / VLLM_DECODE_BATCH, 0.9, "x"
        )
        report.at_most("decode, batch 8 at 256, int8, of vLLM's 72 ms", times["int8"] / VLLM_DECODE_BATCH, 0.5, "x")

        drawn = Sampling(temperature=1.0, top_p=0.9, top_k=50)
        for batch, limit in ((1, 1.5), (32, 3.0)):
            outside = await by_turns(
                f"outside the forward, batch {batch}",
                "ms",
                milliseconds,
                rounds,
                {
                    "greedy": lambda batch=batch: engines["int8"].overhead(64, batch, GREEDY),
                    "top-k, top-p": lambda batch=batch: engines["int8"].overhead(64, batch, drawn),
                },
            )
            for name, each in outside.items():
                report.at_most(f"step outside the forward pass, batch {batch}, {name}", each, limit, "ms")

        report.at_most(
            "model process, start to ready, CPU time, slowest of three",
            max(e.start_s for e in engines.values()),
            6.0,
            "s",
        )
        report.at_most("resident, int8, without the cache", engines["int8"].resident / (1 << 30), 1.2, "GiB")
    return report.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--recorded-llama", action="store_true", help="compare with what llama.cpp once did")
    options = parser.parse_args()
    return asyncio.run(run(options.rounds, options.cpu, options.recorded_llama))


if __name__ == "__main__":
    sys.exit(main())
