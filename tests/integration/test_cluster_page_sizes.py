"""A prefill worker and a decode worker whose pages have different sizes give the colocated cluster's tokens.

Checksums say that the bytes are the same, too."""

from __future__ import annotations

import pytest

from cluster import Cluster, make_prompt, running_cluster

NEW_TOKENS = 6
# Inside a page, one token into another, and over two chunks of 256. Everything between: test_agent_layouts.
LENGTHS = [9, 33, 290]
GROWING = [45, 110, 150, 290]

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_same_tokens(colocated: Cluster) -> None:
    prefill, decode = 32, 8
    settings = {
        "BATON_PREFILL__PAGE_SIZE": str(prefill),
        "BATON_DECODE__PAGE_SIZE": str(decode),
        "BATON_PREFILL__CHUNK_TOKENS": "256",
        "BATON_PREFILL__THREADS": "1",
        "BATON_DECODE__THREADS": "1",
        "BATON_DECODE__CHECKSUM": "crc32c",
    }
    async with running_cluster(settings=settings) as cluster:
        for tokens in LENGTHS:
            prompt = make_prompt(tokens)
            ours = await cluster.generate(prompt, max_tokens=NEW_TOKENS)
            theirs = await colocated.generate(prompt, max_tokens=NEW_TOKENS)
            assert ours.token_ids == theirs.token_ids, tokens
            assert ours.timeline is not None
            assert not ours.timeline.local_prefill
            assert ours.timeline.transfer.pages == -(-(tokens - 1) // min(prefill, decode))
        # Each prompt begins with the one before it; what the decode worker has of it ends inside a page of the other.
        before = 0
        for tokens in GROWING:
            prompt = make_prompt(GROWING[-1])[:tokens]
            ours = await cluster.generate(prompt, max_tokens=NEW_TOKENS, cache_salt="growing")
            theirs = await colocated.generate(prompt, max_tokens=NEW_TOKENS)
            assert ours.token_ids == theirs.token_ids, tokens
            assert ours.timeline is not None
            assert ours.timeline.decode_cached_tokens == before // decode * decode
            assert ours.timeline.prefill_cached_tokens == max(0, before - 1) // prefill * prefill
            assert ours.timeline.transfer.pages == -(-(tokens - 1) // decode) - before // decode
            before = tokens
        samples = await cluster.metrics("agent-decode-0")
        checked = {name: value for name, value in samples.items() if name.startswith("baton_agent_checksums_total")}
        assert checked == {'baton_agent_checksums_total{outcome="match"}': len(LENGTHS) + len(GROWING)}
