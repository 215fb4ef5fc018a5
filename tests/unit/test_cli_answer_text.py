import io

import pytest
from rich.console import Console

from baton_cli.answer_text import printable, show


def test_an_answer_cannot_speak_to_the_terminal():
    assert printable("a\x1b]0;title\x07b\x1b[2J\r\n\tc\x00\x9b5nd é 😀") == "a]0;titleb[2J\n\tc5nd é 😀"


@pytest.mark.parametrize(("terminal", "shown"), [(True, "a[1mb"), (False, "a\x1b[1mb")])
def test_a_pipe_gets_the_answer_as_it_is(terminal, shown):
    file = io.StringIO()
    show(Console(file=file, force_terminal=terminal, color_system=None), "a\x1b[1mb")
    assert file.getvalue() == shown
