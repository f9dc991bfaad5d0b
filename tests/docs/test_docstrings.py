"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "streamrl.core.fold",
    "streamrl.core.packing",
    "streamrl.engines.live_swap.plan",
    "streamrl.producers.episode",
    "streamrl.schemas.control",
    "streamrl.schemas.samples",
    "streamrl.schemas.tasks",
    "streamrl.schemas.versions",
    "streamrl.tensors.digest",
    "streamrl.weights.manifest",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0
