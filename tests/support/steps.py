"""Compare the steps of one trainer with those of another."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from streamrl.config.tree import Config
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from tests.support.meshes import batch

LEARNED = ("train/loss", "train/grad_norm", "rollout/log_probs")


def stepped(config: Config, directory: Path, steps: Iterable[int] = range(3)) -> list[StepResult]:
    """Train these batches of `tests.support.meshes` from the initial parameters."""
    with open_trainer(config, directory) as trainer:
        return [trainer.step(batch(step)) for step in steps]


def check_alike(found: Sequence[StepResult], expected: Sequence[StepResult], *names: str, rel: float, abs: float = 0.0) -> None:
    """Check that as many steps tell nearly the same: of these metrics, or of all where no name is given."""

    def told(result: StepResult) -> dict[str, float]:
        return {name: result.metrics[name] for name in names} if names else dict(result.metrics)

    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert told(ours) == pytest.approx(told(theirs), rel=rel, abs=abs), step
