"""Tests that compile, and a machine on which torch finds no compiler."""

import contextlib
import importlib
import os
from collections.abc import Generator

import pytest
import torch

# Before torch compiles first, here or in a rank: it would start as many processes as there are cores, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
COMPILES = [
    pytest.mark.timeout(600),
    # Of torch, as it compiles.
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]
"""Marks of a test file."""


@contextlib.contextmanager
def without_compiler() -> Generator[None]:
    torch.compiler.reset()
    with importlib.import_module("torch._inductor.config").patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        yield
