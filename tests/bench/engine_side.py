"""Another engine with the default model, told by lines what to compute: `engine_side.py (transformers|llama.cpp) PATH`.

Answers with CPU seconds of this process: `prefill N` of a prompt of N tokens, `decode N` of one step behind N tokens,
the median of several.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

STEPS = 9
# Tokens in a step of a prompt.
CHUNK = 512

Step = Callable[[list[int], int], None]


def prompt(length: int) -> list[int]:
    return [(index * 7919) % 49_000 for index in range(length)]


def llama_cpp(path: str) -> tuple[Step, Callable[[], None]]:
    """With the file's own quantisation, Q4_1."""
    from llama_cpp import Llama

    model = Llama(path, n_ctx=4096, n_threads=1, n_threads_batch=1, n_batch=CHUNK, verbose=False)
    return lambda tokens, past: model.eval(tokens), model.reset


def transformers(path: str) -> tuple[Step, Callable[[], None]]:
    """In float32 for prompts and bfloat16 for decodes: the faster of the two for each."""
    from pathlib import Path

    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from transformers import DynamicCache

    from reference_model import reference_model

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = reference_model().model
    state = {"cache": DynamicCache()}

    def step(tokens: list[int], past: int) -> None:
        wanted = torch.float32 if len(tokens) > 1 else torch.bfloat16
        if model.dtype != wanted:
            model.to(wanted)
            for layer in state["cache"].layers:
                layer.keys, layer.values = layer.keys.to(wanted), layer.values.to(wanted)
        model(torch.tensor([tokens]), past_key_values=state["cache"], use_cache=True, logits_to_keep=1)

    def clear() -> None:
        state["cache"] = DynamicCache()

    return step, clear


def main() -> None:
    kind, path = sys.argv[1:]
    step, clear = {"llama.cpp": llama_cpp, "transformers": transformers}[kind](path)
    print("ready", kind, os.getpid(), flush=True)

    def prefill(length: int) -> float:
        clear()
        tokens = prompt(length)
        begin = time.process_time()
        for start in range(0, length, CHUNK):
            step(tokens[start : start + CHUNK], start)
        return time.process_time() - begin

    def decode(length: int) -> float:
        prefill(length)
        step([1], length)  # the first one of a kind warms up, and casts
        times = []
        for index in range(STEPS):
            begin = time.process_time()
            step([1], length + 1 + index)
            times.append(time.process_time() - begin)
        return statistics.median(times)

    prefill(64)
    for line in sys.stdin:
        what, length = line.split()
        print({"prefill": prefill, "decode": decode}[what](int(length)), flush=True)


if __name__ == "__main__":
    main()
