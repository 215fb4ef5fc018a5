"""Pieces of an answer on the console."""

import re

from rich.console import Console

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show(console: Console, piece: str) -> None:
    """Adds a piece to what is there; a terminal gets it without control characters, a file or a pipe as it is."""
    console.out(printable(piece) if console.is_terminal else piece, end="", highlight=False)


def printable(text: str) -> str:
    """A text without control characters but line ends and tabs: what a model says must not move a terminal's cursor,
    set its title or make it type."""
    return _CONTROLS.sub("", text)
