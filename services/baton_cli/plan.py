"""The services of one cluster on this machine: what each is told. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli.cpus import assign_cpus
from baton_config import AgentSettings, ConfigError, ConfigProblem, Settings
from baton_config.sections import WorkerSettings

# Of a worker: its service and metrics, its agent's control and metrics. Of the gateway: the registry.
_PORTS_PER_WORKER = 4
_PORTS_OF_GATEWAY = 1


@dataclass(frozen=True)
class ServicePlan:
    """``command`` is the subcommand of baton, ``probe`` the gRPC address whose health tells that it is ready."""

    name: str
    command: str
    settings: Settings
    probe: str
    metrics: str


@dataclass(frozen=True)
class WorkerPlan:
    """A worker and the agent beside it; a colocated worker has none."""

    worker: ServicePlan
    agent: ServicePlan | None


@dataclass(frozen=True)
class ClusterPlan:
    gateway: ServicePlan
    workers: tuple[WorkerPlan, ...]

    @property
    def services(self) -> list[ServicePlan]:
        agents = [worker.agent for worker in self.workers if worker.agent is not None]
        return [self.gateway, *(worker.worker for worker in self.workers), *agents]


def ports_needed(settings: Settings) -> int:
    workers = settings.cluster.prefill_workers + settings.cluster.decode_workers
    return _PORTS_OF_GATEWAY + _PORTS_PER_WORKER * workers


def plan_cluster(settings: Settings, run_directory: Path, ports: Iterator[int], cpus: Sequence[int]) -> ClusterPlan:
    """``ports`` yields ports_needed() free ones or more, ``cpus`` are those to be used. Raises ConfigError."""
    cluster = settings.cluster
    prefill = 0 if cluster.colocated else cluster.prefill_workers
    if prefill == 0 and not cluster.colocated and settings.decode.local_prefill == "never":
        problem = "without prefill workers nothing computes a prompt: use --colocated, or set decode.local_prefill"
        raise ConfigError([ConfigProblem("cluster.prefill_workers", problem, "0")])
    sizes = settings.prefill.page_size, settings.decode.page_size
    if prefill and max(sizes) % min(sizes):
        problem = f"one must divide the other, and decode.page_size is {sizes[1]}"
        raise ConfigError([ConfigProblem("prefill.page_size", problem, str(sizes[0]))])
    if cluster.colocated:
        settings = _updated(settings, "decode", local_prefill="always")
    if "registry" not in settings.gateway.model_fields_set:
        settings = _updated(settings, "gateway", registry=f"127.0.0.1:{next(ports)}")
    settings = _updated(settings, "cluster", registry=settings.gateway.registry, run_directory=run_directory)

    names = [f"prefill-{number}" for number in range(prefill)]
    names += [f"decode-{number}" for number in range(cluster.decode_workers)]
    ranks = settings.prefill.tensor_parallel, settings.decode.tensor_parallel * settings.decode.data_parallel
    shares = assign_cpus(cpus, prefill, cluster.decode_workers, *ranks) if cluster.pin_cpus else [()] * len(names)
    planner = _WorkerPlanner(settings, run_directory, ports, names)
    gateway = ServicePlan(
        "gateway", "gateway", settings, settings.gateway.grpc, f"http://{settings.gateway.http}/metrics"
    )
    return ClusterPlan(gateway, tuple(planner.plan(name, share) for name, share in zip(names, shares, strict=True)))


class _WorkerPlanner:
    def __init__(self, settings: Settings, run_directory: Path, ports: Iterator[int], names: list[str]) -> None:
        self._settings = settings
        self._run_directory = run_directory
        self._ports = ports
        self._names = names

    def plan(self, name: str, cpus: tuple[int, ...]) -> WorkerPlan:
        """The worker, with its agent unless it computes every prompt itself."""
        role = name.partition("-")[0]
        options: WorkerSettings = getattr(self._settings, role)
        only = sum(other.startswith(role) for other in self._names) == 1
        settings = _updated(
            self._settings,
            role,
            worker_id=name,
            listen=self._address(options, "listen", only=only),
            metrics=self._address(options, "metrics", only=only),
            cpus=options.cpus or cpus,
        )
        settings = self._with_agent(settings, name)
        told: WorkerSettings = getattr(settings, role)
        worker = ServicePlan(name, f"{role}-worker", settings, told.listen, _url(told))
        if role == "decode" and settings.decode.local_prefill == "always":
            return WorkerPlan(worker, None)
        agent = settings.agent
        return WorkerPlan(worker, ServicePlan(f"agent-{name}", "transfer-agent", settings, agent.socket, _url(agent)))

    def _with_agent(self, settings: Settings, worker: str) -> Settings:
        only = len(self._names) == 1
        return _updated(
            settings,
            "agent",
            socket=f"unix:{self._run_directory / f'agent-{worker}.sock'}",
            handoff=self._run_directory / f"handoff-{worker}.sock",
            control=self._address(settings.agent, "control", only=only),
            metrics=self._address(settings.agent, "metrics", only=only),
        )

    def _address(self, options: WorkerSettings | AgentSettings, name: str, *, only: bool) -> str:
        """What was configured where only one service has it, else a free port of loopback; "" stays none."""
        configured = str(getattr(options, name))
        if name in options.model_fields_set and (only or not configured):
            return configured
        return f"127.0.0.1:{next(self._ports)}"


def _url(options: WorkerSettings | AgentSettings) -> str:
    metrics = str(getattr(options, "metrics", ""))
    return f"http://{metrics}/metrics" if metrics else ""


def _updated(settings: Settings, section: str, **options: object) -> Settings:
    changed = getattr(settings, section).model_copy(update=options)
    return settings.model_copy(update={section: changed})
