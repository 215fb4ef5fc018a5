import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_telemetry import AgentMetrics, DecodeMetrics, GatewayMetrics, MetricsServer, PrefillMetrics
from baton_telemetry.metrics import FABRIC_COUNTERS


@pytest.fixture
async def served():
    metrics = AgentMetrics()
    health = {"problem": None}
    server = MetricsServer(metrics.registry, lambda: health["problem"])
    await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        yield metrics, health, client
    await server.stop()


def samples(text):
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_metrics_are_served_with_the_native_counters(served):
    metrics, _, client = served
    metrics.sessions.set_function(lambda: 3)
    metrics.read_fabric(lambda: {"bytes": 12288, "writes": 2})
    response = await client.get("/metrics")
    values = samples(response.text)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert values["baton_agent_sessions"] == 3
    assert values["baton_agent_fabric_bytes_total"] == 12288
    assert values["process_open_fds"] > 0
    assert "baton_agent_fabric_eagain_total" not in values


async def test_openmetrics_on_request(served):
    response = await served[2].get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_health_tells_what_is_wrong(served):
    _, health, client = served
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    health["problem"] = {"engine": "no step finished in 30 s"}
    response = await client.get("/healthz")
    assert response.status_code == 503
    assert response.json() == {"status": "unhealthy", "engine": "no step finished in 30 s"}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405), ("HEAD", "/healthz", 200)]
)
async def test_other_requests(served, method, path, status):
    response = await served[2].request(method, path)
    assert response.status_code == status
    assert method != "HEAD" or not response.content


async def test_garbage_and_silence_do_no_harm(served):
    client = served[2]
    host, port = client.base_url.host, client.base_url.port
    _, silent = await asyncio.open_connection(host, port)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"\x00\xff garbage\r\n\r\n")
    assert b"400" in await asyncio.wait_for(reader.read(), 5)
    assert (await client.get("/healthz")).status_code == 200
    silent.close()
    writer.close()


async def test_without_an_address_nothing_listens():
    server = MetricsServer(AgentMetrics().registry)
    await server.start("")
    assert server.address == ""
    await server.stop()


def test_names_are_prefixed_and_explained_and_unique():
    names = []
    for catalogue in (GatewayMetrics(), PrefillMetrics(), DecodeMetrics(), AgentMetrics()):
        for family in catalogue.registry.collect():
            if family.name.startswith("baton_"):
                assert family.name.startswith(f"baton_{type(catalogue).__name__.removesuffix('Metrics').lower()}_")
                assert family.documentation
                names.append(family.name)
    assert len(names) == len(set(names)) > 50
    assert all(FABRIC_COUNTERS.values())


def test_the_catalogues_of_one_process_may_share_a_registry():
    registry = GatewayMetrics().registry
    assert DecodeMetrics(registry).registry is registry
