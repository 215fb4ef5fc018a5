"""Perplexity of the default model on 20,000 tokens of English, with weights in bfloat16 and in int8.

The text is the Python language reference as `pydoc_data.topics` carries it: part of every Python, under the Python
licence, and prose with code in between, which is what such a model is asked for.

    python tests/bench/perplexity.py [--tokens 20000]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bars import Report

from baton_model.layers.linear import Quantization
from baton_model.loaders import DtypeName, load_model
from baton_tokenizer.tokenizer import load_tokenizer
from paged_runner import PagedRunner
from reference_model import default_model_path

WINDOW = 2_000
TOKENS = 20_000
# Logits of this many positions at a time: all of a window's take 400 MB.
_ROWS = 250


def english(tokens: int) -> list[int]:
    """The first `tokens` tokens of the reference, topic after topic."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return load_tokenizer(default_model_path()).encode(text[: tokens * 10])[:tokens]


def perplexity(dtype: DtypeName, quantization: Quantization, tokens: list[int]) -> float:
    """exp of the mean of -ln p(token | those before it in its window of WINDOW)."""
    model = load_model(default_model_path(), dtype, quantization=quantization)
    loss, count = 0.0, 0
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        runner = PagedRunner(model, pages=-(-WINDOW // 16))
        for first in range(0, len(window) - 1, _ROWS):
            chunk = window[first : first + _ROWS]
            targets = torch.tensor(window[first + 1 : first + 1 + len(chunk)])
            logprobs = runner.step({"text": chunk})["text"][: len(targets)].log_softmax(dim=-1)
            loss -= logprobs.gather(1, targets[:, None]).double().sum().item()
            count += len(targets)
    return math.exp(loss / count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    tokens = english(parser.parse_args().tokens)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    report = Report()
    found = {}
    for quantization in ("none", "int8"):
        begin = time.perf_counter()
        found[quantization] = perplexity("bfloat16", quantization, tokens)
        print(f"bfloat16, quantization {quantization}: {found[quantization]:.4f} ({time.perf_counter() - begin:.0f} s)")
    report.at_most("perplexity, int8 over bfloat16", found["int8"] / found["none"], 1.01, "x")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
