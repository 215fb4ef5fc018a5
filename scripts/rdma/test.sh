#!/usr/bin/env bash
# The transport's tests over verbs: see docs/rdma.md. Arguments are pytest's; tests among them replace the selection.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TESTS=(
    tests/unit/test_fabric_transfers.py # bytes, counts, layer counters, plans before, during and after their step
    tests/unit/test_fabric_placement.py # streams of some layers, pages of other sizes
    tests/unit/test_fabric_life.py      # cancel, fence, deregistration, deadlines
    tests/unit/test_fabric_processes.py # peers killed and stopped, and their successors
)
# Agents take long to start there, so of their tests those that the others do not contain.
AGENTS=tests/integration/test_agent_processes.py
TESTS+=(
    tests/integration/test_agent_layouts.py # the planner's bytes: unequal sharding, page sizes, regions
    "$AGENTS::test_the_senders_model_process_is_killed"
    "$AGENTS::test_the_sending_agent_is_killed_and_comes_back"
    "$AGENTS::test_the_receiving_agent_is_killed_and_comes_back"
)
for argument in "$@"; do
    case "$argument" in tests/*) TESTS=() ;; esac
done

# 106: DSCP 26 with ECN, as lossless RoCE networks often have it; here it shows that the agents' setting is taken.
exec scripts/rdma/guest.sh env \
    BATON_TEST_FABRICS=verbs BATON_TEST_NODE=10.77.0.1 BATON_TEST_SLOWNESS=8 \
    BATON_AGENT__ROCE_VERSION=v2 BATON_AGENT__ROCE_TRAFFIC_CLASS=106 \
    PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis \
    .venv/bin/python scripts/rdma/describe.py \
    .venv/bin/python -m pytest -p no:cacheprovider -o console_output_style=count --color=no "${TESTS[@]}" "$@"
