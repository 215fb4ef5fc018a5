"""The command as a user meets it, without a cluster or with a stub of one."""

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stub_service
from baton_cli.main import app
from baton_config import Settings

BATON = (sys.executable, "-m", "baton_cli.main")


def baton(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return subprocess.run(
        [*BATON, *arguments], check=False, capture_output=True, text=True, timeout=60, env=environment, **options
    )


def test_config_prints_what_is_in_force(tmp_path):
    (tmp_path / "baton.toml").write_text('[gateway]\nhttp = "127.0.0.1:1"\ngrpc = "127.0.0.1:2"\n')
    result = baton("config", "--set", "gateway.http=127.0.0.1:3", cwd=tmp_path)
    assert 'http = "127.0.0.1:3"\ngrpc = "127.0.0.1:2"\n' in result.stdout


def test_a_cluster_that_was_refused_before_it_began_leaves_no_directory(tmp_path):
    where = tmp_path / "run"
    result = baton("up", "--set", "prefill.page_size=24", "--run-directory", str(where), "--once", "x", cwd=tmp_path)
    assert result.returncode == 2
    assert "prefill.page_size: one must divide the other" in result.stderr
    assert "logs" not in result.stdout
    assert not where.exists()


def test_a_run_directory_that_cannot_be_made_is_a_mistake_in_the_configuration(tmp_path):
    (tmp_path / "file").touch()
    result = baton("up", "--run-directory", str(tmp_path / "file" / "run"), "--once", "x", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "cluster.run_directory: the directory can't be made: Not a directory" in " ".join(result.stderr.split())


def test_the_documentation_names_every_section():
    output = CliRunner().invoke(app, ["config", "--docs"], env={"COLUMNS": "200"}).output
    for path in ("model.name", "cluster.prefill_workers", "gateway.http", "decode.local_prefill", "agent.transport"):
        assert path in output


def test_workers_are_told_how_many_model_processes_and_engines(monkeypatch):
    told = {}
    monkeypatch.setattr(
        "baton_cli.main.run_service", lambda command, settings, parent: told.update({command: settings})
    )
    for arguments in (["prefill-worker", "--tp", "3"], ["decode-worker", "--tp", "2", "--dp", "4"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert told["prefill-worker"].prefill.tensor_parallel == 3
    decode = told["decode-worker"].decode
    assert (decode.tensor_parallel, decode.data_parallel) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["up", "--dtype", "float8"], "model.dtype", 2),
        (["up", "--device", "tpu"], "model.device", 2),
        (["up", "--model", "no-such-model"], "no such file or directory", 1),
        (["up", "--prefill", "0"], "--colocated", 2),
        (["gateway", "--set", "gateway.cpus=4095"], "gateway.cpus", 2),
        (["up", "--colocated", "--prefill", "1"], "no prefill workers", 2),
        (["up", "--colocated", "--prefill-tp", "2"], "no prefill workers", 2),
        (["generate", "hello", "--grpc", "127.0.0.1:1"], "start one with `baton up`", 1),
        (["gateway", "--config", "missing.toml"], "no such file", 2),
    ],
)
def test_mistakes_are_one_message(arguments, message, status):
    result = baton(*arguments)
    assert result.returncode == status
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = baton("up", "--http", address)
    assert result.returncode == 1
    assert f"{address} is taken" in " ".join(result.stderr.split())
    assert "--http" in result.stderr


def test_the_gateway_and_the_agent_import_no_torch():
    code = (
        "import sys, baton_cli.main, baton_cli.up, baton_gateway.main, baton_agent.main, baton_agent.service\n"
        "print([name for name in sys.modules if name.split('.')[0] in {'torch', 'baton_model', 'baton_engine'}])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
        == "[]\n"
    )


@pytest.fixture
async def gateway():
    """Address of a gateway that answers in capitals."""
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as directory:
        cluster = stub_service.make_cluster(Settings(cluster={"colocated": True}), Path(directory))
        try:
            await cluster.start()
            yield cluster.plan.gateway.settings.gateway.grpc
        finally:
            await cluster.stop()


async def test_generate_streams_the_answer_and_the_timeline(gateway):
    result = await asyncio.to_thread(baton, "generate", "one two", "--timeline", "--grpc", gateway)
    assert result.stdout.startswith("ONE TWO \n")
    assert "time to first token" in result.stdout
    assert result.returncode == 0


async def test_chat_keeps_talking_until_ctrl_c(gateway):
    def talk():
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [*BATON, "chat", "--grpc", gateway], stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            seen = b""

            def until(text):
                nonlocal seen
                while text not in seen:
                    seen += os.read(ours, 4096)
                seen = seen[seen.index(text) + len(text) :]

            try:
                for line, answer in ((b"hello there\n", b"HELLO THERE"), (b"again\n", b"AGAIN")):
                    until(b"you")
                    os.write(ours, line)
                    until(answer)
                until(b"you")
                # The prompt is there a moment before the process reads. A signal in that moment is only seen by Python
                # once the read ends, so who sits there presses Ctrl-C again.
                for _ in range(4):
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(5)
                return None
            finally:
                process.kill()
                os.close(ours)

    assert await asyncio.wait_for(asyncio.to_thread(talk), 60) == 0
