"""What is wrong with a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigProblem:
    """``where`` is a path of options such as gateway.http."""

    where: str
    problem: str
    value: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" + (f" (got {self.value})" if self.value else "")


class ConfigError(Exception):
    """The configuration can't be used; ``problems`` has all that was found."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_CONFIGURATION"

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("bad configuration: " + "; ".join(map(str, problems)))
        self.problems = tuple(problems)
        self.fields = {problem.where: problem.problem for problem in problems}


class ModelNotFoundError(Exception):
    """model.name leads nowhere."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"model {name!r}: {problem}")
        self.fields = {"model": name}
