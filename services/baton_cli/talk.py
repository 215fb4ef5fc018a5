"""`baton generate` and `baton chat`."""

import asyncio

from rich.console import Console

from baton_cli.answer_text import show
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
            show(console, piece)
    console.print()
    if timeline:
        console.print(timeline_table(answer.timeline, answer.usage))


def chat(settings: Settings, console: Console, system: str | None, sampling: Sampling) -> None:
    """Turn by turn until end of input or Ctrl-C at the prompt; Ctrl-C in an answer breaks it off. Raises RemoteError.

    Input is read between runs of the event loop, so that Ctrl-C is a plain KeyboardInterrupt there.
    """
    messages: list[tuple[str, str]] = [("system", system)] if system else []
    with asyncio.Runner() as runner:
        client = runner.run(_connect(settings))
        try:
            while True:
                try:
                    line = console.input("[bold cyan]you[/] ").strip()
                except (EOFError, KeyboardInterrupt):
                    console.print()
                    return
                if not line:
                    continue
                answer = Answer()
                messages.append(("user", line))
                try:
                    runner.run(_print_answer(client, console, messages, sampling, answer))
                except KeyboardInterrupt:
                    console.print(" [dim](broken off)[/]", end="")
                console.print()
                messages.append(("assistant", answer.text))
        finally:
            runner.run(client.close())


async def _connect(settings: Settings) -> InferenceClient:
    return InferenceClient(settings)


async def _print_answer(
    client: InferenceClient, console: Console, messages: list[tuple[str, str]], sampling: Sampling, answer: Answer
) -> None:
    console.print("[bold green]model[/] ", end="")
    async for piece in client.generate(messages, sampling, answer):
        show(console, piece)
