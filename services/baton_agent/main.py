"""The transfer agent's process."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from baton_actors import keeping_stop_signals, serve_until_signalled
from baton_config import Settings
from baton_fabric.assignment import groups_of_agent
from baton_fabric.engine import FabricEngine
from baton_fabric.faults import parse_faults
from baton_fabric.topology import read_topology
from baton_rpc import tls_files
from baton_telemetry.exposition import MetricsServer

from .devices import Devices
from .domains import Domains
from .options import AgentOptions
from .roce import choose
from .service import Addresses, TransferAgentService

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")

__all__ = ["TransferAgentService", "run"]


async def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM. Raises what made it impossible to start or to go on."""
    await serve_until_signalled(_serve(settings))


async def _serve(settings: Settings) -> None:
    agent = settings.agent
    faults = parse_faults(agent.faults)
    # Read by libfabric once, when the engine asks it for a provider.
    for option in agent.provider_options:
        name, _, value = option.partition("=")
        os.environ[name] = value
    with keeping_stop_signals():
        devices = await asyncio.to_thread(Devices.find)
        groups = groups_of_agent(
            await asyncio.to_thread(read_topology, SYSFS, os.sched_getaffinity(0)),
            agent.transport,
            agent.node,
            agent.domains_by_device,
        )
        domains = Domains.of_groups(groups)
        engine = await FabricEngine.start(
            agent.transport,
            domains.names,
            spin=agent.spin,
            post_timeout_ms=int(agent.post_timeout_s * 1000),
            device_memory=devices.present,
        )
    try:
        if faults.rules:
            logger.warning("faults at the fabric, for tests: %d rules", len(faults.rules))
            engine.set_faults(faults)
        if engine.provider.startswith("verbs"):
            for domain in engine.capabilities():
                device, address = str(domain["domain"]), str(domain["address"]) or agent.node
                gid = choose(device, address, agent.roce_version, agent.roce_traffic_class)
                logger.info("verbs: %s", gid or device)
        # What both sides must share is the provider, not the name that chose it.
        service = TransferAgentService(
            engine,
            engine.provider,
            agent.node,
            Addresses(agent.socket, str(agent.handoff), agent.control, agent.advertise_host),
            AgentOptions(
                stop_timeout=agent.stop_timeout_s,
                drain_timeout=agent.drain_timeout_s,
                heartbeat_interval=agent.heartbeat_s,
                heartbeat_timeout=agent.heartbeat_timeout_s,
                heartbeat_misses=agent.heartbeat_misses,
                idle_timeout=agent.idle_timeout_s,
                shutdown_timeout=agent.shutdown_timeout_s,
            ),
            tls=tls_files(settings.tls),
            allow_insecure=settings.tls.allow_insecure,
            devices=devices,
            domains=domains,
        )
        metrics = MetricsServer(service.metrics.registry, service.problem)
        try:
            await service.start()
            await metrics.start(agent.metrics)
            await service.failure()
        finally:
            await service.stop()
            await metrics.stop()
    finally:
        await engine.close()
