"""What workers do, one thing at a time, and the metrics that count their time by it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STATES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "trainer": {
            "setup": "before its first batch: model, checkpoint, what is pending",
            "compute": "folds records, packs batches, trains",
            "wait_samples": "waits for records of the sample stream",
            "wait_bus": "waits for the bus to answer",
            "publish": "takes the snapshot of a version for the engines",
            "checkpoint": "takes the snapshot of a checkpoint, or waits for it",
        },
        "engine": {
            "setup": "before its first version",
            "decode": "has completions in its batch (`sglang`: at its server, their prefill included)",
            "prefill": "takes prompts in (`sglang`: counted as `decode`)",
            "idle": "has no requests",
            "held": "has only requests that wait for a newer version",
        },
        "producer": {
            "setup": "before it claims tasks",
            "generate": "has requests at an engine",
            "tools": "runs a producer's code between them",
            "reward": "is scored",
            "publish": "has its samples stored",
            "wait_room": "waits for room on the sample stream",
            "wait_engine": "waits for an engine to ask",
            "wait_credit": "is free: there is no task to claim",
        },
    }
)
"""By kind of worker: states that exclude each other, of its thread (trainer, engine) or of each slot for a task (producer)."""
DOWN = "down"
"""State that the fold of a run adds: the time of which a worker has said nothing."""


def seconds(kind: str, state: str) -> str:
    """The metric that counts the seconds of a state."""
    return f"{kind}/slot_{state}_s" if kind == "producer" else f"{kind}/{state}_s"


def share(kind: str, state: str) -> str:
    """The metric of a state's share of a window."""
    return f"{kind}/share/{state}"


def gpus_of(kind: str) -> str:
    """The metric of the GPUs that a trainer or an engine computes on."""
    return f"{kind}/gpus"
