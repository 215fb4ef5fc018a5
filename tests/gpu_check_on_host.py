"""scripts/gpu_check.py on the host in the place of a GPU: ``python gpu_check_on_host.py [options of the script]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import fake_flashinfer
from host_as_gpu import HostTorch, StreamGpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
gpu_check = importlib.import_module("gpu_check")
gpu_models = importlib.import_module("gpu_models")


def main(program: str = __file__) -> int:
    gpu = StreamGpu()
    rig = gpu_models.Rig(torch.device("cpu"), fake_flashinfer, torch.float32, HostTorch(), gpu)
    status = gpu_check.main(sys.argv[1:], program=program, api=gpu, rig=rig)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
