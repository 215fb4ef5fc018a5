"""One long prompt through a cluster of which a part is about to be killed or stopped."""

from __future__ import annotations

import grpc

from cluster import Answer, Cluster, make_prompt
from conditions import until

# Short enough to be computed twice on a busy machine, in steps enough to be hit between two of them.
PROMPT_TOKENS = 320
SETTINGS = {
    "BATON_PREFILL__CHUNK_TOKENS": "16",
    "BATON_DECODE__CHUNK_TOKENS": "16",
    "BATON_PREFILL__THREADS": "1",
    "BATON_DECODE__THREADS": "1",
}
NEW_TOKENS = 8
Outcome = Answer | grpc.aio.AioRpcError


async def ask(cluster: Cluster, prompt_tokens: int, timeout: float = 60.0, cache_salt: str | None = None) -> Outcome:
    """The answer, or the error that the client sees. `cache_salt`: as `Cluster.generate` has it."""
    try:
        return await cluster.generate(
            make_prompt(prompt_tokens), max_tokens=NEW_TOKENS, timeout=timeout, cache_salt=cache_salt
        )
    except grpc.aio.AioRpcError as error:
        return error


def is_right(outcome: Outcome, expected: list[int]) -> bool:
    return isinstance(outcome, Answer) and outcome.token_ids == expected


def check(outcome: Outcome, expected: list[int]) -> None:
    """The right tokens, or a typed error."""
    if isinstance(outcome, Answer):
        assert outcome.token_ids == expected
    else:
        assert outcome.code() is grpc.StatusCode.UNAVAILABLE
        details = dict(outcome.trailing_metadata() or ())
        assert "grpc-status-details-bin" in details, "a typed error carries its reason"


async def bytes_move(cluster: Cluster, sender: str) -> None:
    """Waits until this agent has written more than it has now."""

    async def written() -> float:
        return (await cluster.metrics(sender))["baton_agent_fabric_bytes_total"]

    before = await written()

    async def moving() -> bool:
        return await written() > before

    await until(moving, "bytes on their way", 20)
