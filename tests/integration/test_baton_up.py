"""`baton up` with a Hugging Face directory, in every form that a cluster may take, as a user starts and stops it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton_tokenizer import load_tokenizer
from baton_up import Up, up
from conditions import until
from tokenizer_samples import byte_level_backend

NAME = "tiny-llama"
# More rows than the tokenizer has ids, as checkpoints with a padded embedding have.
VOCABULARY, CONTEXT = 384, 256
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
NEW_TOKENS = 12

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("models") / NAME
    torch.manual_seed(3)
    backend = byte_level_backend()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        eos_token_id=backend.token_to_id("<|end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return directory


def greedy(checkpoint: Path, prompt: list[int]) -> list[int]:
    """What transformers says in float32, end-of-sequence ignored."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def workers_of(running: Up, prompt: list[int]) -> tuple[str, str]:
    """Decode and prefill worker of one request."""
    async with running.client as client:
        answer = await client.completions.create(
            model=NAME, prompt=prompt, max_tokens=NEW_TOKENS, extra_body={"timeline": True, "ignore_eos": True}
        )
    timeline = (answer.model_extra or {})["baton_timeline"]
    return timeline["decode_worker"], timeline["prefill_worker"]


async def check_answers(running: Up, checkpoint: Path, *, exact: bool) -> None:
    """Both APIs' prompts, a chat, log-probabilities, and one token too many."""
    tokenizer = load_tokenizer(checkpoint)
    messages = [{"role": "user", "content": "Hello there, 12 bells"}]
    async with running.client as client:
        assert [model.id async for model in client.models.list()] == [NAME]
        whole = await client.chat.completions.create(
            model=NAME,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=NEW_TOKENS,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
            extra_body={"ignore_eos": True},
        )
        expected = greedy(checkpoint, tokenizer.encode_chat(messages))
        assert whole.usage is not None and whole.usage.completion_tokens == NEW_TOKENS
        assert whole.choices[0].logprobs is not None
        if exact:
            named = [token_id for token_id in expected if token_id < tokenizer.vocab_size]
            assert whole.choices[0].message.content == tokenizer.decode(named)
        text = ""
        stream = await client.completions.create(
            model=NAME,
            prompt=tokenizer.encode_chat(messages),
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
            await client.completions.create(model=NAME, prompt=[5] * (CONTEXT - 3), max_tokens=4)


async def check_stop(running: Up, checkpoint: Path) -> None:
    """An answer that ends at a stop string tells its usage and where its time went, as any other."""
    prompt = [5, *range(40, 90)]
    text = load_tokenizer(checkpoint).decode(greedy(checkpoint, prompt))
    stop = text[len(text) // 2 :]
    async with running.client as client:
        answer = await client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            stop=stop,
            extra_body={"timeline": True, "ignore_eos": True},
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    timeline = (answer.model_extra or {})["baton_timeline"]
    assert timeline["prefill_worker"] == "prefill-0" and timeline["transfer"]["pages"] == 4
    assert timeline["time_to_first_token_us"] > 0 and timeline["inter_token_us"] > 0


def check_command(running: Up) -> None:
    """`baton generate`, with the table of where the time went."""
    options = ("--grpc", running.grpc, "--max-tokens", "4", "--temperature", "0", "--timeline")
    result = subprocess.run(
        [sys.executable, "-m", "baton_cli.main", "generate", *options, "hello there"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "inter-token latency" in result.stdout


async def test_one_of_each(checkpoint: Path, tmp_path: Path) -> None:
    async with up(checkpoint, tmp_path) as running:
        await check_answers(running, checkpoint, exact=True)
        await check_stop(running, checkpoint)
        await asyncio.to_thread(check_command, running)
        assert {service["name"] for service in running.services()} == {
            "gateway",
            "prefill-0",
            "decode-0",
            "agent-prefill-0",
            "agent-decode-0",
        }


async def test_colocated(checkpoint: Path, tmp_path: Path) -> None:
    async with up(checkpoint, tmp_path, "--colocated", "--decode", "2") as running:
        await check_answers(running, checkpoint, exact=True)
        assert {service["name"] for service in running.services()} == {"gateway", "decode-0", "decode-1"}


@pytest.mark.parametrize("transport", ["shm", "local"])
async def test_two_of_each_in_bfloat16_over_shared_memory(checkpoint: Path, tmp_path: Path, transport: str) -> None:
    options = ("--prefill", "2", "--decode", "2", "--dtype", "bfloat16", "--transport", transport)
    async with up(checkpoint, tmp_path, *options) as running:
        await check_answers(running, checkpoint, exact=False)
        used = await asyncio.gather(*(workers_of(running, [5 + index] * 100) for index in range(4)))
        assert {decode for decode, _ in used} == {"decode-0", "decode-1"}
        assert {prefill for _, prefill in used} == {"prefill-0", "prefill-1"}


async def test_what_is_killed_is_started_again_and_serves(checkpoint: Path, tmp_path: Path) -> None:
    prompt = [5, *range(40, 90)]

    async def once(running: Up) -> str:
        async with running.client as client:
            answer = await client.completions.create(
                model=NAME, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
        return answer.choices[0].text

    async with up(checkpoint, tmp_path) as running:
        expected = await once(running)
        for name in ("gateway", "prefill-0", "decode-0", "agent-prefill-0", "agent-decode-0"):
            (victim,) = (service["pid"] for service in running.services() if service["name"] == name)
            os.kill(victim, signal.SIGKILL)

            async def serves_again(name: str = name, victim: int = victim) -> bool:
                running.check()
                (pid,) = (service["pid"] for service in running.services() if service["name"] == name)
                try:
                    return pid != victim and await once(running) == expected
                except (openai.APIStatusError, openai.APIConnectionError):
                    return False

            await until(serves_again, f"an answer after {name} was killed", 60)
