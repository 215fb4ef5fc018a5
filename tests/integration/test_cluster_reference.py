"""Greedy output through the whole cluster against transformers in float32 on the same weights."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from baton_config.models import resolve_model
from baton_tokenizer import load_tokenizer
from cluster import Answer, Cluster
from reference_model import reference_model

NEW_TOKENS = 64
TOLERANCE = 1e-3
PROMPTS = 40
LONGEST = 2000

TEXT = (
    "The lighthouse keeper wrote every evening, whatever the weather: the hour, the wind, the ships that had passed. "
    "On the 3rd of March, 1911, he counted 42 sails before noon and none after it. Why? He did not say. Water boils "
    "at 100 degrees at sea level; higher up it boils sooner. A function f is continuous at x if for every epsilon "
    "there is a delta.\n\n1. Mix the flour and the butter.\n2. Add two eggs.\n\n\tdef area(r):\n"
    "\t\treturn 3.14159 * r ** 2\n"
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


def prompts() -> list[list[int]]:
    """40 prompts of 1 to 2,000 tokens: half of them short, the rest spread evenly; text, not noise."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    rng = random.Random(1)
    short = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 65, 80, 100, 120, 127, 129, 160, 200]
    spread = [(LONGEST - 256) * index // 19 + 256 for index in range(20)]
    sentences = TEXT.split(". ")
    found = []
    for length in [*short, *spread]:
        ids: list[int] = []
        while len(ids) < length:
            rng.shuffle(sentences)
            ids += tokenizer.encode(". ".join(sentences) + ". ")
        found.append(ids[:length])
    return found


def check(prompt: list[int], answer: Answer) -> None:
    """Teacher-forced: at every position the reference's distribution, given what the cluster said before."""
    logits = reference_model().logits([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    best, choice = logits.topk(2, dim=-1)
    assert len(answer.logprobs) == NEW_TOKENS
    for position, (token, ours) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        margin = float(best[position, 0] - best[position, 1])
        assert token == int(choice[position, 0]) or margin < TOLERANCE, (
            f"prompt of {len(prompt)}: token {position} is {token}; the reference's {int(choice[position, 0])} leads "
            f"by {margin:.2e}"
        )
        assert ours.sampled.token_id == token
        for entry in [ours.sampled, *ours.top]:
            difference = abs(entry.logprob - float(expected[position, entry.token_id]))
            assert difference <= TOLERANCE, f"prompt of {len(prompt)}, position {position}: off by {difference:.2e}"


@pytest.mark.timeout(900)
async def test_forty_prompts_equal_the_reference(disaggregated: Cluster) -> None:
    gate = asyncio.Semaphore(8)

    async def ask(prompt: list[int]) -> Answer:
        async with gate:
            return await disaggregated.generate(prompt, max_tokens=NEW_TOKENS, logprobs=5, timeout=600)

    asked = prompts()
    assert len(asked) == PROMPTS and max(map(len, asked)) == LONGEST and min(map(len, asked)) == 1
    answers = await asyncio.gather(*map(ask, asked))
    for prompt, answer in zip(asked, answers, strict=True):
        await asyncio.to_thread(check, prompt, answer)
    await disaggregated.at_rest(10)
