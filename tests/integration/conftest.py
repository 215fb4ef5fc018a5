"""Clusters that several tests share: starting one takes seconds, being idle costs it nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from cluster import Cluster, running_cluster

CHUNK_TOKENS = 256
PAGE_SIZE = 16
MAX_MODEL_LEN = 2112

SETTINGS = {
    "BATON_MODEL__MAX_MODEL_LEN": str(MAX_MODEL_LEN),
    "BATON_PREFILL__CHUNK_TOKENS": str(CHUNK_TOKENS),
    "BATON_DECODE__CHUNK_TOKENS": str(CHUNK_TOKENS),
    "BATON_PREFILL__THREADS": "1",
    "BATON_DECODE__THREADS": "1",
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def disaggregated() -> AsyncIterator[Cluster]:
    """One prefill and one decode worker, each with its agent, over tcp."""
    async with running_cluster(settings=SETTINGS) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def colocated() -> AsyncIterator[Cluster]:
    async with running_cluster(colocated=True, settings=SETTINGS) as cluster:
        yield cluster
