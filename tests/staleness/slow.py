"""A trainer whose steps take their time."""

import time
from collections.abc import Callable
from typing import Any

from streamrl.core.batches import TrainBatch
from streamrl.trainers.protocol import StepResult


class SlowTrainer:
    """Another trainer, with a pause before each step: `step_s(number)` seconds before the step of that number, from 1."""

    def __init__(self, inner: Any, step_s: Callable[[int], float]) -> None:
        self._inner = inner
        self._step_s = step_s
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, batch: TrainBatch) -> StepResult:
        self._steps += 1
        time.sleep(self._step_s(self._steps))
        return self._inner.step(batch)
