"""`baton generate` and `baton chat`."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from rich.console import Console

from baton_cli.inference import Answer, InferenceClient, Sampling
from baton_cli.timeline import timeline_table
from baton_config import Settings


async def generate(
    settings: Settings, console: Console, prompt: str, sampling: Sampling, *, chat: bool, timeline: bool
) -> None:
    """Streams one answer. Raises RemoteError."""
    answer = Answer()
    async with InferenceClient(settings) as client:
        async for piece in client.generate([("user", prompt)] if chat else prompt, sampling, answer):
            console.out(piece, end="", highlight=False)
    console.print()
    if timeline:
        console.print(timeline_table(answer.timeline, answer.usage))


async def chat(settings: Settings, console: Console, system: str | None, sampling: Sampling) -> None:
    """Turn by turn until end of input. Ctrl-C breaks off the answer, and leaves at the prompt. Raises RemoteError."""
    messages: list[tuple[str, str]] = [("system", system)] if system else []
    async with InferenceClient(settings) as client:
        while True:
            try:
                line = await asyncio.to_thread(console.input, "[bold cyan]you[/] ")
            except EOFError:
                console.print()
                return
            if not line.strip():
                continue
            messages.append(("user", line))
            answer = Answer()
            await _interruptible(_print_answer(client, console, messages, sampling, answer))
            console.print()
            messages.append(("assistant", answer.text))


async def _print_answer(
    client: InferenceClient, console: Console, messages: list[tuple[str, str]], sampling: Sampling, answer: Answer
) -> None:
    console.print("[bold green]model[/] ", end="")
    async for piece in client.generate(messages, sampling, answer):
        console.out(piece, end="", highlight=False)


async def _interruptible(coroutine: Coroutine[Any, Any, None]) -> None:
    """Ctrl-C cancels ``coroutine`` and nothing else."""
    task = asyncio.ensure_future(coroutine)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if not task.cancelled():
        task.result()
