"""Which of the engine's domains serve whose memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton_fabric.assignment import HOST, DomainGroup


@dataclass(frozen=True)
class Domains:
    """`names`: of all, in the order of their numbers. `host`, `gpus`: numbers of those that serve the host's memory,
    and each GPU's by its PCI address."""

    names: tuple[str, ...]
    host: tuple[int, ...]
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, groups: Sequence[DomainGroup]) -> Domains:
        """`groups`: of every GPU, and of the host."""
        names = tuple(dict.fromkeys(domain.name for group in groups for domain in group.domains))
        numbers = {
            group.device: tuple(sorted(names.index(domain.name) for domain in group.domains)) for group in groups
        }
        host = numbers.pop(HOST)
        return cls(names, host, numbers)

    @classmethod
    def everywhere(cls, names: Sequence[str]) -> Domains:
        """All serve everybody's memory."""
        return cls(tuple(names), tuple(range(len(names))))

    def of_gpu(self, address: str) -> tuple[int, ...]:
        """A GPU that the topology doesn't show has the host's."""
        return self.gpus.get(address, self.host)

    def served_by(self, number: int) -> list[str]:
        """Whose memory this domain serves: "host", PCI addresses of GPUs."""
        groups = {**self.gpus, HOST: self.host}
        return [device for device, numbers in groups.items() if number in numbers]
