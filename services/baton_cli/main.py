"""The baton command."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baton_cli.inference import Sampling
from baton_cli.service import run_service
from baton_config import ConfigError, Settings, load_settings
from baton_config.render import options, to_toml
from baton_config.settings import merge, parse_assignment
from baton_rpc import TypedError
from baton_telemetry import configure_logging

app = typer.Typer(
    help="Serves large language models with prefill and decode on separate nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path | None, typer.Option("--config", help="TOML file [default: $BATON_CONFIG, ./baton.toml]")]
Set = Annotated[list[str] | None, typer.Option("--set", "-o", help="section.option=value; see `baton config --docs`")]
Model = Annotated[str | None, typer.Option(help="smollm2, a GGUF file, or a Hugging Face directory")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16")]
Device = Annotated[str | None, typer.Option(help="cpu, or cuda for a GPU a rank")]
Quantization = Annotated[str | None, typer.Option(help="none or int8 (weights)")]
Transport = Annotated[str | None, typer.Option(help="auto, tcp, local, shm, verbs or efa")]
Http = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="OpenAI HTTP API")]
Grpc = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="gRPC API")]
Registry = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="registry of workers, at the gateway")]
Listen = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the service's own gRPC address")]
AgentSocket = Annotated[str | None, typer.Option("--agent", metavar="unix:PATH", help="socket of this node's agent")]
TensorParallel = Annotated[int | None, typer.Option("--tp", min=1, help="model processes that share an engine")]
DataParallel = Annotated[int | None, typer.Option("--dp", min=1, help="engines, each with a cache of its own")]
Parent = Annotated[int | None, typer.Option(hidden=True)]
MaxTokens = Annotated[int, typer.Option(min=1, help="tokens to generate at most")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy [default: 1]")]
TopP = Annotated[float | None, typer.Option(help="nucleus mass [default: 1]")]
Seed = Annotated[int | None, typer.Option(help="same seed, same answer")]

SYSFS = Path("/sys")

console = Console()
errors = Console(stderr=True)


def _settings(file: Path | None, assignments: list[str] | None, flags: Mapping[str, Mapping[str, Any]]) -> Settings:
    return load_settings(merge(*map(parse_assignment, assignments or []), flags), file)


@app.command()
def up(
    *,
    prefill: Annotated[int | None, typer.Option(min=0, help="prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="decode workers")] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(min=1, help="model processes of each prefill worker, which share its engine")
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(min=1, help="model processes of each engine of a decode worker")
    ] = None,
    decode_dp: Annotated[int | None, typer.Option(min=1, help="engines of each decode worker")] = None,
    colocated: Annotated[
        bool | None, typer.Option("--colocated", help="workers that do both, without transfers")
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    transport: Transport = None,
    http: Http = None,
    grpc: Grpc = None,
    run_directory: Annotated[Path | None, typer.Option(help="for sockets, logs and cluster.json")] = None,
    once: Annotated[str | None, typer.Option(metavar="PROMPT", help="answer this and exit")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """A whole cluster on this machine, until Ctrl-C."""
    from baton_cli import up as cluster

    if colocated and (prefill or prefill_tp):
        raise typer.BadParameter("--colocated starts no prefill workers, of which --prefill and --prefill-tp speak")
    settings = _settings(
        config,
        assignments,
        {
            "cluster": {
                "prefill_workers": prefill,
                "decode_workers": decode,
                "colocated": colocated,
                "run_directory": run_directory,
            },
            "model": {"name": model, "dtype": dtype, "quantization": quantization, "device": device},
            "prefill": {"tensor_parallel": prefill_tp},
            "decode": {"tensor_parallel": decode_tp, "data_parallel": decode_dp},
            "agent": {"transport": transport},
            "gateway": {"http": http, "grpc": grpc},
        },
    )
    configure_logging("up", settings.telemetry.log_format, "WARNING")
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    status = asyncio.run(cluster.up(settings, console, once, sampling))
    raise typer.Exit(status)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue, or with --chat a user's message")],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="render with the model's chat template")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="keep the k most likely tokens")] = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="don't end at end-of-sequence")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="print where the time went")] = False,
    grpc: Grpc = None,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Sends one prompt to a running gateway and streams the answer."""
    from baton_cli import talk

    settings = _settings(config, assignments, {"gateway": {"grpc": grpc}})
    sampling = Sampling(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()), ignore_eos)
    asyncio.run(talk.generate(settings, console, prompt, sampling, chat=chat, timeline=timeline))


@app.command()
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    grpc: Grpc = None,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Talks with the model of a running gateway."""
    from baton_cli import talk

    settings = _settings(config, assignments, {"gateway": {"grpc": grpc}})
    talk.chat(settings, console, system, Sampling(max_tokens, temperature, top_p, seed=seed))


@app.command()
def gateway(
    *,
    http: Http = None,
    grpc: Grpc = None,
    registry: Registry = None,
    model: Model = None,
    config: Config = None,
    assignments: Set = None,
    parent: Parent = None,
) -> None:
    """The gateway alone: public APIs and the registry."""
    flags = {"gateway": {"http": http, "grpc": grpc, "registry": registry}, "model": {"name": model}}
    run_service("gateway", _settings(config, assignments, flags), parent)


@app.command("prefill-worker")
def prefill_worker(
    *,
    listen: Listen = None,
    registry: Registry = None,
    agent: AgentSocket = None,
    model: Model = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    tp: TensorParallel = None,
    config: Config = None,
    assignments: Set = None,
    parent: Parent = None,
) -> None:
    """A prefill worker alone; its transfer agent must run on the same node."""
    flags = _worker_flags(
        "prefill",
        listen=listen,
        registry=registry,
        agent=agent,
        model=model,
        dtype=dtype,
        quantization=quantization,
        device=device,
    )
    flags["prefill"]["tensor_parallel"] = tp
    run_service("prefill-worker", _settings(config, assignments, flags), parent)


@app.command("decode-worker")
def decode_worker(
    *,
    listen: Listen = None,
    registry: Registry = None,
    agent: AgentSocket = None,
    model: Model = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    tp: TensorParallel = None,
    dp: DataParallel = None,
    config: Config = None,
    assignments: Set = None,
    parent: Parent = None,
) -> None:
    """A decode worker alone; its transfer agent must run on the same node."""
    flags = _worker_flags(
        "decode",
        listen=listen,
        registry=registry,
        agent=agent,
        model=model,
        dtype=dtype,
        quantization=quantization,
        device=device,
    )
    flags["decode"] |= {"tensor_parallel": tp, "data_parallel": dp}
    run_service("decode-worker", _settings(config, assignments, flags), parent)


@app.command("transfer-agent")
def transfer_agent(
    *,
    agent: AgentSocket = None,
    control: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="address for other agents")] = None,
    transport: Transport = None,
    node: Annotated[str | None, typer.Option(metavar="HOST", help="local address of the fabric's endpoints")] = None,
    config: Config = None,
    assignments: Set = None,
    parent: Parent = None,
) -> None:
    """A transfer agent alone: one a node."""
    flags = {"agent": {"socket": agent, "control": control, "transport": transport, "node": node}}
    run_service("transfer-agent", _settings(config, assignments, flags), parent)


@app.command()
def topology(
    sysfs: Annotated[Path, typer.Option(help="another tree than this node's, such as one recorded elsewhere")] = SYSFS,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Prints this node's GPUs and NICs, and which of them go together."""
    from baton_cli import topology as node

    node.show(console, sysfs, _settings(config, assignments, {}).agent)


@app.command("config")
def show_config(
    docs: Annotated[bool, typer.Option("--docs", help="all options with their meaning")] = False,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Prints the effective configuration as TOML."""
    if not docs:
        sys.stdout.write(to_toml(_settings(config, assignments, {})))
        return
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("option", no_wrap=True)  # a name that is cut in two can't be searched for
    for column in ("default", "values", "meaning"):
        table.add_column(column, overflow="fold")
    for option in options():
        table.add_row(option.path, option.default, option.kind, option.description)
    console.print(table)
    console.print("\nEach is set by --set section.option=value, BATON_SECTION__OPTION=value, or [section] in the file.")


def _worker_flags(section: str, **options: str | None) -> dict[str, dict[str, Any]]:
    return {
        section: {"listen": options["listen"]},
        "cluster": {"registry": options["registry"]},
        "agent": {"socket": options["agent"]},
        "model": {
            "name": options["model"],
            "dtype": options["dtype"],
            "quantization": options["quantization"],
            "device": options["device"],
        },
    }


def main() -> None:
    """Typed errors become one message on stderr and exit status 1, or 2 if the configuration is at fault."""
    # Processes that are started run another program at once. gRPC's own handlers of a fork are of no use to them, and
    # write a line into the log at every start.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # What gRPC has to say of connections that end is no news where services end.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if not isinstance(error, TypedError):
            raise
        errors.print("error:", style="bold red", end=" ")
        errors.print(str(error), markup=False, highlight=False)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


if __name__ == "__main__":
    main()
