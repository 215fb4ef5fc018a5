"""Starting, restarting and ending a cluster, with services that do no work."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import stub_service
from baton_actors import RestartLimitExceeded
from baton_cli.child import ServiceFailedError, remove_shared_memory
from baton_cli.inference import Answer, InferenceClient, Sampling
from baton_config import Settings


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as path:  # short: it holds unix sockets
        yield Path(path)


def settings(**sections):
    return Settings(**{"cluster": {"start_timeout_s": 60}, **sections})


async def until(condition, seconds=30):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(0.02)


def services(directory):
    return {service["name"]: service for service in json.loads((directory / "cluster.json").read_text())["services"]}


def of_directory(directory):
    """Processes that name the directory in their arguments."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if any(str(directory) in argument for argument in arguments) and process.info["status"] != "zombie":
            found.append(process.info["pid"])
    return found


def test_memory_that_a_killed_agent_shared_is_removed(tmp_path):
    for name in ("77:0:1", "77:0:2", "778:0:1", "7:0:1", "77"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "77:0:2", (1000, 1000))
    remove_shared_memory(77, since=2000, directory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"77:0:2", "778:0:1", "7:0:1", "77"}


async def test_a_cluster_starts_answers_restarts_what_dies_and_leaves_nothing(directory):
    states = []
    cluster = stub_service.make_cluster(settings(), directory, lambda name, state, _: states.append((name, state)))
    try:
        await cluster.start()
        started = services(directory)
        assert set(started) == {"gateway", "prefill-0", "decode-0", "agent-prefill-0", "agent-decode-0"}
        assert {service["state"] for service in started.values()} == {"ready"}
        assert states.index(("agent-decode-0", "ready")) < states.index(("decode-0", "starting"))
        assert len(of_directory(directory)) == 5
        assert "on CPUs (1,)" in (directory / "decode-0.log").read_text()

        answer = Answer()
        async with InferenceClient(cluster.plan.gateway.settings) as client:
            pieces = [piece async for piece in client.generate([("user", "one two")], Sampling(), answer)]
        assert pieces == ["ONE ", "TWO "]
        assert (answer.text, answer.finish_reason, answer.usage.prompt_tokens) == ("ONE TWO ", "stop", 7)

        os.kill(started["prefill-0"]["pid"], signal.SIGKILL)
        await until(lambda: states.count(("prefill-0", "ready")) == 2)
        restarted = services(directory)
        assert restarted["prefill-0"]["pid"] != started["prefill-0"]["pid"]
        assert restarted["prefill-0"]["grpc"] == started["prefill-0"]["grpc"]
        assert restarted["decode-0"]["pid"] == started["decode-0"]["pid"]
    finally:
        await cluster.stop()
    order = [name for name, state in states if state == "stopped"]
    assert order[0] == "gateway"
    assert set(order[1:3]) == {"prefill-0", "decode-0"}
    assert set(order[3:]) == {"agent-prefill-0", "agent-decode-0"}
    assert of_directory(directory) == []


async def test_a_service_that_does_not_start_is_named_with_its_last_words(directory):
    cluster = stub_service.make_cluster(settings(model={"name": "crash"}), directory)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            await cluster.start()
    finally:
        await cluster.stop()
    [error, *_] = caught.value.exceptions
    assert isinstance(error, ServiceFailedError)
    assert "did not start: it ended with status 1" in str(error)
    assert "the weights are missing" in str(error)
    assert of_directory(directory) == []


async def test_a_service_that_keeps_dying_ends_the_cluster(directory):
    states = []
    cluster = stub_service.make_cluster(
        settings(cluster={"start_timeout_s": 60, "restart_limit": 0, "colocated": True}),
        directory,
        lambda name, state, _: states.append((name, state)),
    )
    try:
        await cluster.start()
        assert set(services(directory)) == {"gateway", "decode-0"}
        os.kill(services(directory)["decode-0"]["pid"], signal.SIGKILL)
        with pytest.raises(RestartLimitExceeded, match="decode-0 was ended by SIGKILL"):
            await asyncio.wait_for(cluster.join(), 30)
    finally:
        await cluster.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_no_service_outlives_the_supervisor(directory, number):
    process = await asyncio.create_subprocess_exec(
        sys.executable, stub_service.__file__, "up", str(directory), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        assert len(of_directory(directory)) == 6
        process.send_signal(number)
        code = await asyncio.wait_for(process.wait(), 30)
        assert code == (-number if number == signal.SIGKILL else 0)
        if number == signal.SIGKILL:
            await until(lambda: of_directory(directory) == [])
        assert of_directory(directory) == []
    finally:
        for pid in of_directory(directory):
            os.kill(pid, signal.SIGKILL)
