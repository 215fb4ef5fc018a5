"""scripts/gpu_check.py: without a GPU, on host memory in the place of one, and on a GPU that is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton_memory.cuda import NoGpu, open_driver

TESTS = Path(__file__).parents[1]
BROKEN = """
import sys, fake_gpu
fake_gpu.HostGpu.cuStreamWriteValue64 = lambda self, stream, address, value, flags: None
fake_gpu.gpu_check.WAIT_S = 0.1
sys.exit(fake_gpu.main())
"""


def run(*arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    return result.returncode, result.stdout + result.stderr


def test_without_a_gpu_it_says_so():
    try:
        open_driver()
    except NoGpu:
        pass
    else:
        pytest.skip("there is a GPU here")
    status, output = run(str(TESTS.parent / "scripts" / "gpu_check.py"))
    assert output.startswith("no GPU here: ")
    assert status == 77


def test_every_check_passes_on_memory_of_the_host():
    status, output = run(str(TESTS / "fake_gpu.py"))
    assert "7 of 7 checks passed" in output
    assert "67,158,016 bytes handed over" in output
    assert status == 0


def test_a_counter_that_the_gpu_does_not_move_is_found():
    status, output = run("-c", BROKEN)
    assert "4 of 7 checks passed" in output
    assert "not within" in output
    assert status == 1
