"""`baton up`: a whole cluster on this machine."""

import logging
import os
import shutil
import tempfile
import textwrap
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from baton_actors import serve_until_signalled
from baton_cli.answer_text import show
from baton_cli.cluster import Cluster
from baton_cli.inference import Answer, InferenceClient, Sampling
from baton_cli.plan import ClusterPlan, plan_cluster, ports_needed
from baton_cli.ports import AddressTakenError, free_ports, is_free
from baton_cli.progress import Progress
from baton_cli.timeline import timeline_table
from baton_config import ConfigError, ConfigProblem, Settings, resolve_model, served_name

logger = logging.getLogger(__name__)

_SHOWN_PROMPT = 300


async def up(settings: Settings, console: Console, once: str | None = None, sampling: Sampling | None = None) -> int:
    """Serves until a signal, or answers one prompt (``once``). Returns the exit status; raises typed errors."""
    resolve_model(settings.model.name)
    settings = _with_free_addresses(settings, choose=once is not None)
    run_directory = _make_run_directory(settings.cluster.run_directory)
    try:
        cpus = sorted(os.sched_getaffinity(0))
        plan = plan_cluster(settings, run_directory, iter(free_ports(ports_needed(settings))), cpus)
        progress = Progress(console, [service.name for service in plan.services])
        cluster = Cluster(plan, run_directory, progress.note)
        try:
            signalled = await serve_until_signalled(_session(cluster, progress, console, once, sampling or Sampling()))
        finally:
            await cluster.stop()
    except BaseException:
        if not any(run_directory.iterdir()):
            run_directory.rmdir()
            raise
        console.print(f"[dim]logs are kept in {run_directory}[/]", highlight=False)
        raise
    if settings.cluster.run_directory is None:
        shutil.rmtree(run_directory, ignore_errors=True)
    if signalled is not None:
        console.print(f"[dim]{signalled.name}: all services have ended[/]", highlight=False)
    # An answer that was asked for and broken off is a failure; a server that was told to stop is none.
    return 128 + signalled if signalled is not None and once is not None else 0


async def _session(
    cluster: Cluster, progress: Progress, console: Console, once: str | None, sampling: Sampling
) -> None:
    began = time.monotonic()
    try:
        with progress:
            await cluster.start()
    except ExceptionGroup as group:
        # The first failure is the cause; the others were started beside it and cancelled.
        raise group.exceptions[0] from None
    _print_summary(cluster.plan, console, time.monotonic() - began)
    if once is None:
        await cluster.join()
    else:
        await answer_once(cluster.plan.gateway.settings, console, once, sampling)


async def answer_once(settings: Settings, console: Console, prompt: str, sampling: Sampling) -> None:
    """Streams the answer to one user message and prints where its time went."""
    console.print()
    console.print(Text.assemble(("Prompt  ", "bold"), textwrap.shorten(prompt, _SHOWN_PROMPT, placeholder=" …")))
    console.print("[bold]Answer[/]  ", end="")
    answer = Answer()
    try:
        async with InferenceClient(settings) as client:
            async for piece in client.generate([("user", prompt)], sampling, answer):
                show(console, piece)
    finally:
        console.print("\n")
    console.print(timeline_table(answer.timeline, answer.usage))


def _print_summary(plan: ClusterPlan, console: Console, seconds: float) -> None:
    settings = plan.gateway.settings
    gateway = settings.gateway
    quantization = "" if settings.model.quantization == "none" else f", {settings.model.quantization}"
    name = served_name(settings.model.name, settings.model.served_name)
    console.print(
        f"[bold]{name}[/] ({settings.model.dtype}{quantization}) is served after {seconds:.1f} s: "
        f"HTTP [cyan]http://{gateway.http}/v1[/], gRPC [cyan]{gateway.grpc}[/]",
        highlight=False,
    )
    console.print(f"[dim]logs and metrics addresses: {settings.cluster.run_directory}[/]", highlight=False)


def _with_free_addresses(settings: Settings, *, choose: bool) -> Settings:
    """Checks the public addresses before anything starts; with ``choose``, those nobody asked for may move."""
    gateway = settings.gateway
    for name in ("http", "grpc", "registry"):
        address = getattr(gateway, name)
        asked = name in gateway.model_fields_set
        if (name == "registry" and not asked) or is_free(address):
            continue
        if not choose or asked:
            raise AddressTakenError(address, f"--{name}")
        gateway = gateway.model_copy(update={name: f"127.0.0.1:{free_ports(1)[0]}"})
    return settings.model_copy(update={"gateway": gateway})


def _make_run_directory(configured: Path | None) -> Path:
    """A unix socket's path holds 107 bytes, so the directory is short. Raises ConfigError where none can be made."""
    if configured is not None:
        try:
            configured.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the directory can't be made: {error.strerror}"
            raise ConfigError([ConfigProblem("cluster.run_directory", problem, str(configured))]) from error
        return configured.resolve()
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = base and os.access(base, os.W_OK | os.X_OK) and len(base) < 40
    return Path(tempfile.mkdtemp(prefix="baton-", dir=base if usable else "/tmp"))
