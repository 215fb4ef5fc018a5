"""The default model against transformers in float32, with the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from baton_model.loaders import load_model
from baton_model.model import Model
from paged_runner import PagedRunner
from rank_threads import on_ranks
from reference_model import ReferenceModel, default_model_path, reference_model

TOLERANCE = 1e-3
VOCABULARY = 49_152


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(default_model_path(), "float32")


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return reference_model()


def prompt(length: int) -> list[int]:
    """Tokens drawn at random, most of them frequent ones."""
    draw = random.Random(length)
    return [min(int(draw.paretovariate(0.4)) + 16, VOCABULARY - 1) for _ in range(length)]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max().item() < tolerance


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (1, []),
        (2, [1]),
        (15, []),
        (16, [7]),
        (17, [16]),
        (130, [1, 2, 3, 62]),
        (300, [128]),
        (300, [129, 1, 127]),
    ],
)
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_logits_of_every_position_in_any_chunking(model, reference, length, chunks, order):
    tokens = prompt(length)
    runner = PagedRunner(model, pages=20, order=order)
    assert_close(runner.run("only", tokens, chunks), reference.logits(tokens))


def test_decode_steps_after_a_prompt(model, reference):
    tokens = prompt(77)
    continuation = reference.greedy(tokens, 20)
    expected = reference.logits(tokens + continuation, last=21)
    runner = PagedRunner(model, pages=10)
    rows = [runner.run("only", tokens, [50])[-1]]
    rows += [runner.step({"only": [token]})["only"][-1] for token in continuation]
    assert_close(torch.stack(rows), expected)
    assert [int(row.argmax()) for row in rows[:-1]] == continuation


def test_a_long_prompt_and_its_continuation(model, reference):
    tokens = prompt(2000)
    expected = reference.logits(tokens, last=17)
    runner = PagedRunner(model, pages=130)
    rows = [runner.run("only", tokens[:1984], [512, 512, 512])[-1]]
    rows += [runner.step({"only": [token]})["only"][-1] for token in tokens[1984:]]
    assert_close(torch.stack(rows), expected)


def test_a_mixed_batch_equals_solo_runs(model):
    """Decodes of very different lengths beside chunks of prompts, some starting, some going on."""
    prompts = {"a": prompt(3), "b": prompt(40), "c": prompt(410), "d": prompt(90), "e": prompt(65), "f": prompt(1)}
    solo = PagedRunner(model, pages=60, seed=1)
    alone = {name: solo.run(name, tokens, []) for name, tokens in prompts.items()}

    batch = PagedRunner(model, pages=60, seed=2)
    for name in "abc":
        batch.run(name, prompts[name][:-1], [])
    batch.run("d", prompts["d"][:33], [])
    together = batch.step(
        {
            "d": prompts["d"][33:],
            "a": prompts["a"][-1:],
            "e": prompts["e"],
            "c": prompts["c"][-1:],
            "f": prompts["f"],
            "b": prompts["b"][-1:],
        }
    )
    for name, rows in together.items():
        assert_close(rows, alone[name][-len(rows) :])


def test_recycled_pages_leave_no_trace(model):
    tokens = prompt(50)
    runner = PagedRunner(model, pages=4)
    first = runner.run("first", tokens, [])
    runner.free("first")
    runner.run("stranger", prompt(63), [])
    runner.free("stranger")
    assert torch.equal(runner.run("second", tokens, []), first)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded(reference, ranks):
    """3 KV heads on 2 ranks, too; each rank dequantises its rows and columns only."""
    tokens = prompt(60)

    def logits(group):
        runner = PagedRunner(load_model(default_model_path(), "float32", group=group), pages=10)
        return runner.run("only", tokens, [33, 15, *[1] * 12])

    rows = on_ranks(ranks, logits)
    assert all(torch.equal(rows[0], other) for other in rows[1:])
    assert_close(rows[0], reference.logits(tokens))


def test_bfloat16_is_close_to_float32(reference):
    tokens = prompt(120)
    runner = PagedRunner(load_model(default_model_path(), "bfloat16"), pages=10)
    found = runner.run("only", tokens, [100])
    expected = reference.logits(tokens)
    # bfloat16 has 8 bits; what matters is the distribution.
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean().item() < 0.02
