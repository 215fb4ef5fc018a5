"""How large a chunk of a prompt is, from how long some tokens took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.executor import chunk_for

SECONDS = st.floats(1e-4, 100)


@given(SECONDS, st.integers(1, 4096), SECONDS)
def test_a_chunk_takes_no_longer_than_it_may_and_half_of_it_at_least(chunk_s, tokens, seconds):
    chunk = chunk_for(chunk_s, tokens, seconds)
    assert 32 <= chunk <= 4096
    assert chunk & (chunk - 1) == 0
    if chunk > 32:
        assert chunk * seconds / tokens <= chunk_s * 1.0001
    if chunk < 4096:
        assert 2 * chunk * seconds / tokens > chunk_s * 0.9999


@given(SECONDS, SECONDS, st.integers(1, 4096), SECONDS)
def test_more_time_is_never_a_smaller_chunk(one, other, tokens, seconds):
    assert chunk_for(min(one, other), tokens, seconds) <= chunk_for(max(one, other), tokens, seconds)
