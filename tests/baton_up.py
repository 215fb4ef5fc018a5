"""`baton up` as a user starts and stops it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from cluster import free_port
from conditions import until

SMALL = ("--set", "prefill.kv_bytes=16MiB", "--set", "decode.kv_bytes=16MiB")


@dataclass
class Up:
    process: subprocess.Popen[str]
    directory: Path
    http: str
    grpc: str

    def check(self) -> None:
        """Fails if the cluster has ended."""
        assert self.process.poll() is None, (self.directory.parent / "up.log").read_text()

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def registry(self) -> str:
        return str(json.loads((self.directory / "cluster.json").read_text())["registry"])

    def services(self) -> list[dict[str, Any]]:
        return list(json.loads((self.directory / "cluster.json").read_text())["services"])


@asynccontextmanager
async def up(checkpoint: Path, directory: Path, *options: str) -> AsyncIterator[Up]:
    """Started and healthy, also in the eyes of what supervises it; afterwards ended by Ctrl-C, with nothing left."""
    http, grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "baton_cli.main", "up", "--model", str(checkpoint), "--http", http, "--grpc", grpc]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with (directory / "up.log").open("w") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
            [*command, "--run-directory", str(directory / "run"), *SMALL, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            env=environment,
        )
    running = Up(process, directory / "run", f"http://{http}", grpc)
    services: Sequence[psutil.Process] = ()
    try:
        async with httpx.AsyncClient() as client:

            async def healthy() -> bool:
                running.check()
                try:
                    return (await client.get(f"{running.http}/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(healthy, "a healthy cluster", 120)

        def all_ready() -> bool:
            running.check()
            return all(service["state"] == "ready" for service in running.services())

        # A service that dies before is a failed start, which ends the cluster.
        await until(all_ready, "a cluster whose services are all ready", 30)
        services = psutil.Process(process.pid).children(recursive=True)
        yield running
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 0, (directory / "up.log").read_text()
        assert not [service for service in services if service.is_running() and service.status() != "zombie"]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
