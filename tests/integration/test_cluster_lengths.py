"""Every length at which a page or a chunk begins or ends gives the same tokens disaggregated and colocated."""

from __future__ import annotations

import grpc
import httpx
import pytest

from cluster import Cluster, make_prompt

CHUNK, PAGE, CONTEXT = 256, 16, 2112
NEW_TOKENS = 6
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("tokens", [*LENGTHS, CONTEXT - NEW_TOKENS])
async def test_same_tokens_disaggregated_and_colocated(disaggregated: Cluster, colocated: Cluster, tokens: int) -> None:
    prompt = make_prompt(tokens)
    ours = await disaggregated.generate(prompt, max_tokens=NEW_TOKENS)
    theirs = await colocated.generate(prompt, max_tokens=NEW_TOKENS)
    assert ours.token_ids == theirs.token_ids
    assert len(ours.token_ids) == NEW_TOKENS
    assert ours.usage is not None and ours.usage.prompt_tokens == tokens
    assert ours.timeline is not None and theirs.timeline is not None
    assert not ours.timeline.local_prefill
    assert ours.timeline.transfer.pages == -(-(tokens - 1) // PAGE)
    assert sum(chunk.tokens for chunk in ours.timeline.chunks) == tokens - 1


async def test_one_token_too_many_is_refused_over_grpc(disaggregated: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await disaggregated.generate(make_prompt(CONTEXT - NEW_TOKENS + 1), max_tokens=NEW_TOKENS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(CONTEXT) in (caught.value.details() or "")


async def test_one_token_too_many_is_refused_over_http(disaggregated: Cluster) -> None:
    async with httpx.AsyncClient() as client:
        models = (await client.get(f"{disaggregated.http}/v1/models")).json()
        body = {
            "model": models["data"][0]["id"],
            "prompt": make_prompt(CONTEXT - NEW_TOKENS + 1),
            "max_tokens": NEW_TOKENS,
        }
        answer = await client.post(f"{disaggregated.http}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.json()["error"]["message"]


async def test_one_token_prompt_transfers_nothing(disaggregated: Cluster) -> None:
    before = await disaggregated.metrics("agent-prefill-0")
    answer = await disaggregated.generate(make_prompt(1), max_tokens=3)
    after = await disaggregated.metrics("agent-prefill-0")
    assert len(answer.token_ids) == 3
    assert after["baton_agent_fabric_bytes_total"] == before["baton_agent_fabric_bytes_total"]
    assert answer.timeline is not None and answer.timeline.prefill_worker == ""


async def test_one_new_token_is_one_token(disaggregated: Cluster) -> None:
    answer = await disaggregated.generate(make_prompt(40), max_tokens=1)
    assert len(answer.token_ids) == 1
