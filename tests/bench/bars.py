"""What a benchmark holds its figures against, and the table that it prints."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

# More load than this before the benchmark began, and its figures are of the others too.
QUIET_LOAD = 2.5


@dataclass(frozen=True)
class Bar:
    name: str
    figure: float
    limit: float
    unit: str
    at_least: bool

    @property
    def passed(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def line(self) -> str:
        word = "at least" if self.at_least else "at most"
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name:64s} {self.figure:9.3f} {self.unit:6s} ({word} {self.limit:g})"


@dataclass
class Report:
    """Bars in the order in which they were measured. `finish` prints them and says what the process should return."""

    bars: list[Bar] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def at_least(self, name: str, figure: float, limit: float, unit: str = "") -> None:
        self._add(Bar(name, figure, limit, unit, at_least=True))

    def at_most(self, name: str, figure: float, limit: float, unit: str = "") -> None:
        self._add(Bar(name, figure, limit, unit, at_least=False))

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(f"skip  {name}: {why}")
        print(self.skipped[-1], flush=True)

    def finish(self) -> int:
        print()
        for bar in self.bars:
            print(bar.line())
        for line in self.skipped:
            print(line)
        missed = sum(not bar.passed for bar in self.bars)
        print(f"{len(self.bars) - missed} of {len(self.bars)} bars met")
        if self.load > QUIET_LOAD:
            print(f"The load was {self.load:.1f} when this began: measure again on a machine that is quiet.")
        return 1 if missed or not self.bars else 0

    def _add(self, bar: Bar) -> None:
        self.bars.append(bar)
        print(f"  {bar.line()}", flush=True)
