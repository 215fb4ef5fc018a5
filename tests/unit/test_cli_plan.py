import itertools
from pathlib import Path

import pytest
from baton.v1 import common_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton_cli.cpus import assign_cpus
from baton_cli.plan import plan_cluster, ports_needed
from baton_cli.ports import free_ports, is_free
from baton_cli.timeline import format_bytes, format_ms, timeline_rows
from baton_config import ConfigError, Settings


def plan(**sections):
    settings = Settings(**sections)
    ports = list(range(1000, 1000 + ports_needed(settings)))
    return plan_cluster(settings, Path("/run/b"), iter(ports), [0, 1])


@given(
    st.lists(st.integers(0, 255), unique=True, max_size=64),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_prefill_and_decode_share_no_cpu(cpus, prefill, decode, prefill_ranks, decode_ranks):
    shares = assign_cpus(cpus, prefill, decode, prefill_ranks, decode_ranks)
    assert len(shares) == prefill + decode
    used = set(itertools.chain(*shares))
    assert used <= set(cpus)
    if len(cpus) < 2:
        assert not used
        return
    assert all(shares)
    assert not set(itertools.chain(*shares[:prefill])) & set(itertools.chain(*shares[prefill:]))
    if prefill + decode <= len(cpus) and prefill and decode:
        assert used == set(cpus)


@pytest.mark.parametrize(
    ("cpus", "prefill", "decode", "shares"),
    [
        ([0, 1], 1, 1, [(0,), (1,)]),
        ([0, 1], 2, 1, [(0,), (0,), (1,)]),
        ([0, 1], 0, 1, [(0, 1)]),
        ([0, 1, 2, 3, 4, 5, 6, 7], 1, 1, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ([0, 1, 2, 3], 1, 3, [(0,), (1,), (2,), (3,)]),
        ([5], 1, 1, [(), ()]),
    ],
)
def test_cpus(cpus, prefill, decode, shares):
    assert assign_cpus(cpus, prefill, decode) == shares


def test_who_has_more_model_processes_gets_more_cpus():
    assert assign_cpus(range(8), 1, 1, 3, 1) == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert assign_cpus(range(8), 1, 1, 1, 3) == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert assign_cpus(range(2), 1, 1, 4, 2) == [(0,), (1,)]
    cluster = plan(prefill={"tensor_parallel": 2}, decode={"tensor_parallel": 2, "data_parallel": 2})
    assert [worker.worker.settings.decode.data_parallel for worker in cluster.workers] == [2, 2]


@given(prefill=st.integers(1, 4), decode=st.integers(1, 4))
def test_no_two_services_share_an_address(prefill, decode):
    cluster = plan(cluster={"prefill_workers": prefill, "decode_workers": decode})
    addresses = [service.probe for service in cluster.services] + [service.metrics for service in cluster.services]
    addresses += [worker.agent.settings.agent.control for worker in cluster.workers]
    addresses += [str(worker.agent.settings.agent.handoff) for worker in cluster.workers]
    assert len(set(addresses)) == len(addresses)
    assert len({service.name for service in cluster.services}) == 1 + 2 * (prefill + decode)


def test_a_worker_and_its_agent_agree():
    for worker in plan().workers:
        assert worker.worker.settings.agent == worker.agent.settings.agent
        assert worker.worker.settings.registry_target == plan().gateway.settings.gateway.registry


def test_a_colocated_worker_has_no_agent():
    cluster = plan(cluster={"colocated": True})
    assert [service.name for service in cluster.services] == ["gateway", "decode-0"]
    assert cluster.workers[0].worker.settings.decode.local_prefill == "always"
    assert cluster.workers[0].worker.settings.decode.cpus == (0, 1)


def test_configured_addresses_are_kept_where_one_service_has_them():
    decode = {"listen": "127.0.0.1:7", "metrics": "", "cpus": "3"}
    one, two = plan(decode=decode), plan(decode=decode, cluster={"decode_workers": 2})
    assert (one.workers[1].worker.probe, one.workers[1].worker.metrics) == ("127.0.0.1:7", "")
    assert one.workers[1].worker.settings.decode.cpus == (3,)
    assert len({worker.worker.probe for worker in two.workers}) == 3


def test_a_cluster_that_could_not_compute_a_prompt_is_refused():
    with pytest.raises(ConfigError, match="--colocated"):
        plan(cluster={"prefill_workers": 0})
    assert len(plan(cluster={"prefill_workers": 0}, decode={"local_prefill": "fallback"}).services) == 3


def test_workers_whose_pages_do_not_fit_each_other_are_refused():
    with pytest.raises(ConfigError, match="one must divide the other"):
        plan(prefill={"page_size": 24}, decode={"page_size": 16})
    assert plan(prefill={"page_size": 24}, decode={"page_size": 8}).workers
    assert plan(prefill={"page_size": 24}, cluster={"colocated": True}).workers


def test_free_ports_are_free():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(f"127.0.0.1:{port}") for port in ports)
    assert not is_free("192.0.2.1:80")


def test_the_timeline_as_rows():
    timeline = common_pb2.Timeline(
        tokenize_us=1500,
        prefill_queue_us=20,
        chunks=[common_pb2.ChunkTiming(tokens=512, compute_us=1_000_000)],
        transfer=common_pb2.TransferStats(bytes=47_185_920, pages=64, writes=1, extents=1920, duration_us=900_000),
        time_to_first_token_us=1_100_000,
        inter_token_us=40_000,
        decode_worker="decode-0",
        prefill_worker="prefill-0",
        prefill_retries=1,
    )
    rows = {row.step: row for row in timeline_rows(timeline, common_pb2.Usage(prompt_tokens=513, completion_tokens=9))}
    assert rows["tokenise"].duration_us == 1500
    assert rows["prefill queue"].note == "at prefill-0, after 1 failed"
    assert rows["prefill compute, chunk 1"].note == "512 tokens, 512 tokens/s"
    assert rows["transfer"].note == "47.2 MB, 64 pages"
    assert rows["  in"].note == "1 write of 1,920 extents, 1,920.0 extents each"
    assert rows["inter-token latency"].note == "25.0 tokens/s, 9 tokens"


def test_many_chunks_of_a_prompt_are_three_rows():
    chunks = [common_pb2.ChunkTiming(tokens=32, compute_us=320_000)] * 19
    chunks.append(common_pb2.ChunkTiming(tokens=17, compute_us=200_000))
    told = [
        (row.step.partition(", ")[2], row.duration_us, row.note)
        for row in timeline_rows(common_pb2.Timeline(chunks=chunks), common_pb2.Usage())
        if row.step.startswith("prefill compute")
    ]
    assert told == [
        ("chunk 1", 320_000, "32 tokens, 100 tokens/s"),
        ("chunks 2 to 19", 18 * 320_000, "576 tokens, 100 tokens/s"),
        ("chunk 20", 200_000, "17 tokens, 85 tokens/s"),
    ]


def test_cached_tokens_are_told_by_where_they_were():
    timeline = common_pb2.Timeline(
        decode_cached_tokens=48, prefill_worker="prefill-0", prefill_cached_tokens=1, first_decode_step_us=1
    )
    rows = [(row.step, row.note) for row in timeline_rows(timeline, common_pb2.Usage())]
    assert rows[2:6] == [
        ("reserve pages", ""),
        ("prefix cache", "48 tokens at the decode worker"),
        ("prefill queue", "at prefill-0"),
        ("prefix cache", "1 token at the prefill worker"),
    ]


def test_a_timeline_without_a_transfer():
    local = [row.step for row in timeline_rows(common_pb2.Timeline(local_prefill=True), common_pb2.Usage())]
    short = [row.step for row in timeline_rows(common_pb2.Timeline(), common_pb2.Usage())]
    assert local == short
    assert "transfer" not in short
    assert "inter-token latency" not in short


def test_figures():
    assert [format_bytes(count) for count in (999, 12_288, 47_185_920, 3_000_000_000)] == [
        "999 B",
        "12.3 kB",
        "47.2 MB",
        "3.0 GB",
    ]
    assert [format_ms(value) for value in (None, 0, 999, 1_234_567)] == ["", "0.00", "1.00", "1,234.6"]
