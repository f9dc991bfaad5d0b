"""What `bench engine` writes down while it measures."""

from __future__ import annotations

import msgspec

from benchmarks.engine.spec import Spec
from benchmarks.machine import Machine


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round."""

    model: str
    batch: int
    contender: str
    round: int
    tokens: int
    """New tokens made."""
    wall_s: float
    cpu_s: float
    """Of the whole process; nothing but the contender runs in it."""


class Failure(msgspec.Struct, frozen=True):
    """A contender that does not run here."""

    model: str
    contender: str
    reason: str


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run."""

    spec: Spec
    machine: Machine
    parameters: dict[str, int]
    """Of each model."""
    timings: list[Timing]
    failures: list[Failure] = []
    logprob_distances: dict[str, float] = {}
    """By model: largest difference of our log-probs to transformers' in one pass over the finished sequences."""
