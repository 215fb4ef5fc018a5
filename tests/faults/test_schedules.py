"""A selection of the random fault schedules; tests/bench/fault_schedules.py runs as many as one likes."""

import pytest

from fault_schedules import HEAD_DIMS, run_schedules


@pytest.mark.parametrize(
    ("transport", "head_dim", "several"),
    [
        ("tcp", HEAD_DIMS[0], False),
        ("tcp", HEAD_DIMS[1], False),
        ("tcp", HEAD_DIMS[1], True),
        ("local", HEAD_DIMS[1], False),
    ],
)
async def test_whatever_fails_every_page_is_accounted_for(transport, head_dim, several):
    outcomes = await run_schedules(range(40), transport, head_dim, several)
    # The selection is worth something only if it sees each kind of end.
    for how in ("receiver: full", "sender: done", "sender: WRITE_FAILED", "receiver: CANCELLED_BY_SENDER"):
        assert outcomes[how] > 0, outcomes
    for proof in ("FULL", "QUIESCED", "FENCED"):
        assert outcomes[f"closed: INBOX_OUTCOME_{proof}"] > 0, outcomes
