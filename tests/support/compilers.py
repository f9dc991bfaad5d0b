"""A machine on which torch finds no compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def without_compiler() -> Generator[None]:
    """In this process."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        yield
