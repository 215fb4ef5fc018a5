"""The tests that docs/lessons.md names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_lesson_has_its_tests() -> None:
    rows = [line for line in (ROOT / "docs/lessons.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 15
    for row in rows:
        named = re.findall(r"`(\S+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"def {test}\(", (ROOT / "tests" / file).read_text()), f"{file} has no {test}"
