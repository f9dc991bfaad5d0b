"""What slime's hooks return where that is no sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DynamicFilterOutput:
    """Verdict of a dynamic filter."""

    keep: bool
    reason: str | None = None


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function gives while a run trains."""

    samples: list[Any]
    """Groups."""
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function gives in an evaluation."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = field(default=None)
