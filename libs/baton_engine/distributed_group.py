"""Ranks that combine through torch.distributed: on GPUs, through NCCL.

They find each other through a file that all of them have open, which lies in memory and has no name. NCCL itself opens
TCP sockets to set its rings up, and keeps them; it is told to bind them to loopback. So the ranks of one engine on
several GPUs are the one case in which a model process holds INET sockets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from baton_model.errors import GroupBroken
from baton_model.parallel import RankGroup

# Set where the environment doesn't say otherwise. All ranks are on one node.
NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

# How long `meet` waits. Whoever started the ranks ends all of them when one has died while loading.
_LOADING = timedelta(hours=1)


class DistributedGroup(RankGroup):
    """One rank's end. Tensors are on `device`; sums may be captured in CUDA graphs, gathers may not.

    On a GPU a call returns once it is queued, and so a rank that left a step, or is gone, leaves the others waiting
    where no error can reach them. Whoever gave them the step ends those that don't come back from it
    (`EngineClient.step`); if nobody does, torch's watchdog does after `patience_s`.
    """

    def __init__(
        self,
        rendezvous_fd: int,
        rank: int,
        ranks: int,
        *,
        device: torch.device,
        patience_s: float,
        backend: str = "nccl",
    ) -> None:
        """Combines nothing before `meet`."""
        self.rank, self.ranks = rank, ranks
        self._device = device
        self._patience = timedelta(seconds=patience_s)
        self._backend = backend
        self._store = dist.FileStore(f"/proc/self/fd/{rendezvous_fd}", ranks)  # type: ignore[attr-defined]
        if backend == "nccl":
            for name, value in NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)

    def meet(self) -> None:
        with self._guard("meet"):
            self._store.set(f"baton-rank-{self.rank}", "here")
            self._store.wait([f"baton-rank-{rank}" for rank in range(self.ranks)], _LOADING)
            if not dist.is_initialized():
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                dist.init_process_group(
                    self._backend, store=self._store, rank=self.rank, world_size=self.ranks, timeout=self._patience
                )
            # The first sum is what makes the connections.
            dist.all_reduce(torch.zeros(1, device=self._device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        with self._guard("sum"):
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        with self._guard("gather"):
            mine = torch.tensor([x.shape[-1]], device=self._device)
            found = [torch.empty_like(mine) for _ in range(self.ranks)]
            dist.all_gather(found, mine)
            sizes = torch.cat(found).tolist()
            # Every rank's part as wide as the widest: they must be alike.
            padded = x.new_zeros((*x.shape[:-1], max(sizes)))
            padded[..., : x.shape[-1]] = x
            parts = [torch.empty_like(padded) for _ in range(self.ranks)]
            dist.all_gather(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @contextmanager
    def _guard(self, call: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupBroken(
                f"the {call} of rank {self.rank} with {self.ranks - 1} others failed: {error}",
                rank=self.rank,
                ranks=self.ranks,
                call=call,
            ) from error
