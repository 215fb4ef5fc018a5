"""The stand-in for FlashInfer takes nothing that the installed package doesn't take: names, order, defaults.

The package imports without a GPU; where it is not installed there is nothing to compare with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import fake_flashinfer

flashinfer = pytest.importorskip("flashinfer")

FUNCTIONS = [name for name, value in vars(fake_flashinfer).items() if inspect.isfunction(value) and name[0] != "_"]
WRAPPERS = [
    name for name, value in vars(fake_flashinfer).items() if inspect.isclass(value) and name.startswith("Batch")
]
# Its public signature is open; what it passes its keywords on to is not.
BEHIND = {("BatchDecodeWithPagedKVCacheWrapper", "plan"): "_plan_impl"}


def compare(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    real = inspect.signature(theirs).parameters
    for place, (name, parameter) in enumerate(inspect.signature(ours).parameters.items()):
        assert name in real, f"{theirs.__qualname__} has no parameter {name}"
        assert parameter.default in (inspect.Parameter.empty, real[name].default)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and parameter.default is inspect.Parameter.empty:
            assert list(real)[place] == name, f"{name} is not parameter {place} of {theirs.__qualname__}"
    needed = {
        name for name, each in real.items() if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    }
    assert needed <= set(inspect.signature(ours).parameters), "the stand-in lets a required argument be left out"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "kernel"])
def test_functions(name):
    compare(getattr(fake_flashinfer, name), getattr(flashinfer, name))


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_wrappers(name, method):
    theirs = getattr(flashinfer.mla if "MLA" in name else flashinfer, name)
    compare(getattr(getattr(fake_flashinfer, name), method), getattr(theirs, BEHIND.get((name, method), method)))


def test_latent_metadata():
    compare(fake_flashinfer.MLAPlanMetadata.csr, flashinfer.mla.MLAPlanMetadata.csr)


def test_the_pinned_version_is_the_one_compared_with():
    assert flashinfer.__version__ == "0.7.4"
