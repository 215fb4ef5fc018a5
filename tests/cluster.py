"""A whole cluster as separate processes, each of which a test can kill, stop and start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc

from conditions import until

START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that mean nothing, the same for the same arguments."""
    rng = random.Random(seed * 100_003 + tokens)
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


@dataclass
class Service:
    """One process of the cluster."""

    name: str
    command: str
    environment: dict[str, str]
    log: Path
    metrics: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "baton_cli.main", self.command],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 15.0) -> int:
        """SIGTERM; SIGKILL, and an error, if that does not end it in time."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} did not end within {timeout} s of SIGTERM") from None
        return self.process.returncode

    def model_process(self) -> psutil.Process:
        """The worker's model process; of several that of rank 0."""
        return self.model_processes()[0]

    def model_processes(self) -> list[psutil.Process]:
        """Of all ranks, in order."""
        found = [
            child
            for child in psutil.Process(self.pid).children()
            if any("model_process" in word for word in child.cmdline())
        ]
        assert found, f"{self.name} has no model process"
        return sorted(found, key=lambda process: process.create_time())


@dataclass
class Answer:
    """What one Generate call gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish_reason: int = 0
    usage: common_pb2.Usage | None = None
    timeline: common_pb2.Timeline | None = None
    token_times: list[float] = field(default_factory=list)


class Cluster:
    """Gateway, and a transfer agent beside each worker; or colocated workers without agents."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        colocated: bool = False,
        transport: str = "tcp",
        settings: Mapping[str, str] | None = None,
        cpus: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: further environment for every service; `cpus`: cpulists by service name ("prefill-0")."""
        self.directory = Path(tempfile.mkdtemp(prefix="bt-"))
        self.http = f"http://127.0.0.1:{free_port()}"
        self.grpc = f"127.0.0.1:{free_port()}"
        self.registry = f"127.0.0.1:{free_port()}"
        self.services: dict[str, Service] = {}
        common = {
            "BATON_GATEWAY__HTTP": self.http.removeprefix("http://"),
            "BATON_GATEWAY__GRPC": self.grpc,
            "BATON_GATEWAY__REGISTRY": self.registry,
            "BATON_AGENT__TRANSPORT": transport,
            **(settings or {}),
        }
        cpus = cpus or {}
        self._add("gateway", "gateway", common, {})
        roles = [("decode", decode)] if colocated else [("prefill", prefill), ("decode", decode)]
        for role, count in roles:
            for index in range(count):
                name = f"{role}-{index}"
                section = role.upper()
                worker = {
                    f"BATON_{section}__WORKER_ID": name,
                    f"BATON_{section}__METRICS": f"127.0.0.1:{free_port()}",
                }
                if name in cpus:
                    worker[f"BATON_{section}__CPUS"] = cpus[name]
                if colocated:
                    worker["BATON_DECODE__LOCAL_PREFILL"] = "always"
                else:
                    agent = {
                        "BATON_AGENT__SOCKET": f"unix:{self.directory}/{name}.sock",
                        "BATON_AGENT__HANDOFF": f"{self.directory}/{name}.ho",
                        "BATON_AGENT__METRICS": f"127.0.0.1:{free_port()}",
                    }
                    worker |= agent
                    self._add(f"agent-{name}", "transfer-agent", common | agent, agent)
                self._add(name, f"{role}-worker", common | worker, worker)
        self.workers = [name for name in self.services if name.startswith(("prefill", "decode"))]
        self.channel: grpc.aio.Channel | None = None

    def _add(self, name: str, command: str, environment: Mapping[str, str], own: Mapping[str, str]) -> None:
        metrics = next((value for key, value in own.items() if key.endswith("__METRICS")), "")
        if name == "gateway":
            metrics = self.http.removeprefix("http://")
        elif not name.startswith("agent-"):
            section = "PREFILL" if name.startswith("prefill") else "DECODE"
            metrics = own[f"BATON_{section}__METRICS"]
        self.services[name] = Service(name, command, dict(environment), self.directory / f"{name}.log", metrics)

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for service in self.services.values():
            service.start()
        self.channel = grpc.aio.insecure_channel(self.grpc)
        await self.ready(len(self.workers))

    async def ready(self, workers: int, timeout: float = START_TIMEOUT_S) -> None:
        """Waits until so many workers are registered; fails with a log's end if a service has ended."""

        async def registered() -> bool:
            for service in self.services.values():
                if service.process is not None and not service.running:
                    raise AssertionError(f"{service.name} ended:\n{service.log.read_text()[-3000:]}")
            return len(await self.registered_workers()) >= workers

        try:
            await until(registered, f"{workers} workers registered", timeout)
        except AssertionError as error:
            ends = "\n".join(f"--- {s.name}\n{s.log.read_text()[-1500:]}" for s in self.services.values())
            raise AssertionError(f"{error}\n{ends}") from None

    async def registered_workers(self) -> list[registry_pb2.WorkerInfo]:
        async with grpc.aio.insecure_channel(self.registry) as channel:
            try:
                answer = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return []
            return list(answer.workers)

    async def stop(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        problems = []
        for service in self.services.values():
            try:
                if service.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(service.pid, signal.SIGCONT)
                    await asyncio.to_thread(service.stop)
            except AssertionError as error:
                problems.append(f"{error}\n{service.log.read_text()[-2000:]}")
        keep = os.environ.get("BATON_TEST_KEEP_LOGS")
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)
        assert not problems, "\n".join(problems)

    # --- use ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        logprobs: int | None = None,
        timeout: float = 120.0,
        on_token: Callable[[Answer], None] | None = None,
        cache_salt: str | None = None,
    ) -> Answer:
        """One request over gRPC; raises grpc.aio.AioRpcError.

        `cache_salt` None: one that nobody else has, so that the same prompt is computed and transferred each time.
        """
        assert self.channel is not None
        request = inference_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParams(
                max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos, logprobs=logprobs
            ),
            cache_salt=secrets.token_hex(8) if cache_salt is None else cache_salt,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        answer = Answer()
        async for message in inference_pb2_grpc.InferenceStub(self.channel).Generate(request, timeout=timeout):
            answer.token_ids += message.token_ids
            answer.token_times += [time.monotonic()] * len(message.token_ids)
            answer.logprobs += message.logprobs
            answer.text += message.text
            if message.finish_reason:
                answer.finish_reason = message.finish_reason
                answer.usage = message.usage
                answer.timeline = message.timeline
            if on_token is not None and message.token_ids:
                on_token(answer)
        return answer

    async def metrics(self, name: str) -> dict[str, float]:
        """The samples of a service's /metrics, by name with labels."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{self.services[name].metrics}/metrics", timeout=10)).text
        samples = {}
        for line in text.splitlines():
            match = re.fullmatch(r"([^#\s{]+(?:\{.*\})?) (\S+)", line)
            if match:
                samples[match.group(1)] = float(match.group(2))
        return samples

    async def levels(self) -> dict[str, float]:
        """What must return to where it was: free pages of every pool, open inboxes and transfers of every agent."""
        found = {}
        for name, service in self.services.items():
            if not service.running or name == "gateway":
                continue
            try:
                samples = await self.metrics(name)
            except httpx.TransportError:
                # It is starting.
                found[f"{name} unreachable"] = 1
                continue
            if name.startswith("agent-"):
                found[f"{name} inboxes"] = samples["baton_agent_open_inboxes"]
                found[f"{name} transfers"] = samples["baton_agent_open_transfers"]
            else:
                role = name.partition("-")[0]
                found[f"{name} pages in use"] = samples[f"baton_{role}_pages"] - samples[f"baton_{role}_free_pages"]
                found[f"{name} requests"] = (
                    samples[f"baton_{role}_running_requests"] + samples[f"baton_{role}_waiting_requests"]
                )
        return found

    async def at_rest(self, timeout: float) -> None:
        """Waits until nothing is held anywhere."""
        last: dict[str, float] = {}

        async def rest() -> bool:
            last.clear()
            last.update(await self.levels())
            return not any(last.values())

        try:
            await until(rest, "everything given back", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None


@contextlib.asynccontextmanager
async def running_cluster(**options: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(**options)  # type: ignore[arg-type]
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
