"""The services of a cluster as child processes of this one."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baton_actors import RestartPolicy, Supervisor, first_to_end
from baton_cli.child import PROGRAM, ServiceProcess
from baton_cli.plan import ClusterPlan, ServicePlan
from baton_cli.registered import wait_until_registered

logger = logging.getLogger(__name__)

# Told of a service's name, its new state, and the seconds since the cluster's start.
OnState = Callable[[str, str, float], None]


class Cluster:
    """Starts what a plan says, restarts what dies, and ends all of it in order: gateway, workers, agents."""

    def __init__(
        self, plan: ClusterPlan, run_directory: Path, on_state: OnState, program: Sequence[str] = PROGRAM
    ) -> None:
        self.plan = plan
        self.run_directory = run_directory
        self._on_state = on_state
        self._program = program
        self._began = time.monotonic()
        self._supervisors: dict[str, Supervisor] = {}
        self._processes: dict[str, tuple[ServiceProcess, str]] = {}

    async def start(self) -> None:
        """Returns when every worker is registered and the gateway serves. Raises ServiceFailedError."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start(self.plan.gateway))
            for worker in self.plan.workers:
                group.create_task(self._start_in_turn(worker.agent, worker.worker))
        await wait_until_registered(self.plan)

    async def join(self) -> None:
        """Until a service has used up its restarts. Raises RestartLimitExceeded."""
        await first_to_end(*(supervisor.join() for supervisor in self._supervisors.values()))

    async def stop(self) -> None:
        """Idempotent. No process of the cluster is left when it returns."""
        workers = [worker.worker.name for worker in self.plan.workers]
        agents = [worker.agent.name for worker in self.plan.workers if worker.agent is not None]
        for tier in ([self.plan.gateway.name], workers, agents):
            running = [self._supervisors.pop(name) for name in tier if name in self._supervisors]
            await asyncio.gather(*(supervisor.stop() for supervisor in running))

    async def _start_in_turn(self, *plans: ServicePlan | None) -> None:
        for plan in plans:
            if plan is not None:
                await self._start(plan)

    async def _start(self, plan: ServicePlan) -> None:
        supervisor = Supervisor("cluster")
        policy = RestartPolicy(limit=plan.settings.cluster.restart_limit, first=0.2)
        await supervisor.start(
            plan.name, lambda: ServiceProcess(plan, self.run_directory, self._note, self._program), policy
        )
        self._supervisors[plan.name] = supervisor

    def _note(self, process: ServiceProcess, state: str) -> None:
        self._processes[process.plan.name] = (process, state)
        self._on_state(process.plan.name, state, time.monotonic() - self._began)
        self._write_state()

    def _write_state(self) -> None:
        """cluster.json, for tools: replaced whole, so that a reader never sees a part."""
        services = [
            {
                "name": process.plan.name,
                "command": process.plan.command,
                "state": state,
                "pid": process.pid,
                "grpc": process.plan.probe,
                "metrics": process.plan.metrics,
                "log": str(process.log),
            }
            for process, state in self._processes.values()
        ]
        gateway = self.plan.gateway.settings.gateway
        state = {"http": gateway.http, "grpc": gateway.grpc, "registry": gateway.registry, "services": services}
        new = self.run_directory / "cluster.json.new"
        new.write_text(json.dumps(state, indent=1) + "\n")
        os.replace(new, self.run_directory / "cluster.json")
