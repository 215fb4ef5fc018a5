"""Progress of a cluster's start: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Use as a context manager around the start; `note` may be called before, in and after it."""

    def __init__(self, console: Console, services: list[str]) -> None:
        self._console = console
        self._states = dict.fromkeys(services, "waiting")
        self._since: dict[str, float] = {}
        self._status = Status("", console=console)
        self._live = False

    def __enter__(self) -> "Progress":
        self._live = self._console.is_terminal
        if self._live:
            self._status.start()
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live = False
        self._status.stop()

    def note(self, service: str, state: str, seconds: float) -> None:
        """A service changed its state, so many seconds after the cluster's start."""
        before, self._states[service] = self._states[service], state
        now = time.monotonic()
        if state == "ready":
            took = now - self._since.get(service, now)
            self._console.print(f"[green]✓[/] {service} [dim]ready in {took:.1f} s[/]", highlight=False)
        elif state == "starting":
            self._since[service] = now
            if before == "ready":
                self._console.print(
                    f"[yellow]↻[/] {service} [dim]ended by itself; starting it again[/]", highlight=False
                )
            elif not self._console.is_terminal:
                self._console.print(f"  {service} starting", highlight=False)
        self._show()

    def _show(self) -> None:
        if self._live:
            waiting = [name for name, state in self._states.items() if state == "starting"]
            self._status.update("starting " + ", ".join(waiting) if waiting else "waiting for the workers to register")
