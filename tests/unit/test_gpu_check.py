"""scripts/gpu_check.py without a GPU: on the host in the place of one, and on one that is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fake_flashinfer
import gpu_check_on_host
from baton_memory.cuda import Device, NoGpu, open_driver
from gpu_check_on_host import gpu_check, gpu_models
from host_as_gpu import HostTorch, StreamGpu

TESTS = Path(__file__).parents[1]
PROGRAM = gpu_check_on_host.__file__
# In the place of checks: one that crashes, one that hangs, one that fails as nobody foresaw.
BROKEN = """
import os, sys, time
import gpu_check_on_host as host

def crashes(device, program):
    print("last words", flush=True)
    os.kill(os.getpid(), 9)

def hangs(device, program):
    time.sleep(600)

def surprises(device, program):
    return 1 // 0

names = list(host.gpu_check.DRIVER_CHECKS)
host.gpu_check.LIMITS[names[1]] = 0.5
for name, check in zip(names, (crashes, hangs, surprises)):
    host.gpu_check.DRIVER_CHECKS[name] = check
sys.exit(host.main(__file__))
"""


def run(*arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def rig():
    return gpu_models.Rig(torch.device("cpu"), fake_flashinfer, torch.float32, HostTorch(), StreamGpu())


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


@pytest.mark.parametrize("name", gpu_check.DRIVER_CHECKS)
def test_checks_of_memory_and_fabric_hold_on_memory_of_the_host(name):
    gpu = StreamGpu()
    with closing(Device(open_driver(gpu), 0)) as device:
        try:
            assert gpu_check.DRIVER_CHECKS[name](device, PROGRAM)
        except gpu_check.Skipped as reason:
            # There is no torch with CUDA here, and no libfabric that takes memory of a GPU.
            assert "not implemented" in str(reason).lower() or "no CUDA" in str(reason)
    assert not gpu.held()
    assert not gpu.graphs


@pytest.mark.parametrize("name", gpu_check.MODEL_CHECKS)
def test_checks_of_models_hold_on_stand_ins(rig, name):
    try:
        assert gpu_check.MODEL_CHECKS[name](rig)
    except gpu_check.Skipped:
        assert name in ("layer counter seen while a graph runs", "ranks over NCCL", "speed")


def wrong(rig, **kernels):
    return gpu_models.Rig(
        rig.device, SimpleNamespace(**(vars(fake_flashinfer) | kernels)), rig.dtype, rig.through, rig.api
    )


def test_entries_in_a_wrong_place_are_found(rig):
    def append(key, value, rows, positions, *others, **layout):
        fake_flashinfer.append_paged_kv_cache(key, value, rows, positions.flip(0).contiguous(), *others, **layout)

    with pytest.raises(gpu_check.Failed):
        gpu_models.check_attention(wrong(rig, append_paged_kv_cache=append))


def test_a_normalisation_that_forgets_its_weight_is_found(rig):
    def rmsnorm(x, weight, eps):
        return fake_flashinfer.rmsnorm(x, torch.ones_like(weight), eps)

    with pytest.raises(gpu_check.Failed, match="rms_norm: error"):
        gpu_models.check_operators(wrong(rig, rmsnorm=rmsnorm))


def test_truncation_that_cuts_nothing_is_found(rig):
    def keep(probs, limits, is_deterministic):
        return probs

    with pytest.raises(gpu_check.Failed, match="outside the best 8"):
        gpu_models.check_sampler(wrong(rig, top_k_renorm_probs=keep, top_p_renorm_probs=keep))


def test_a_counter_that_the_gpu_does_not_move_is_found(rig, monkeypatch):
    monkeypatch.setattr(StreamGpu, "launched", lambda self, values: None)
    monkeypatch.setattr("baton_engine.executor.Executor._advance", lambda self, value: None)
    with pytest.raises(gpu_check.Failed, match="the layer counter stands at 0"):
        gpu_models.check_graphs(rig)


def test_one_check_that_fails_leaves_the_others_alone(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    names = list(gpu_check.DRIVER_CHECKS)[:4]
    status, output = run(str(program), "--only", *names)
    assert status == 1
    for words in ("last words", "the process ended with -9", "no end after ", "ZeroDivisionError", "Traceback"):
        assert words in output
    table = output.strip().splitlines()[-5:]
    assert [line.split()[0] for line in table[:4]] == ["FAILED", "FAILED", "FAILED", "ok"]
    assert table[4] == "1 passed, 3 failed, 0 skipped"
