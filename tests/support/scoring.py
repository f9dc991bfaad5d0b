"""What a trainer's models say of a batch, token by token: a step needs it inside, and tests look at it from outside."""

from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config.registry import Role
from streamrl.core.batches import TrainBatch
from streamrl.trainers.ranks.leading import LeadingTrainer
from streamrl.trainers.table.trainer import TableTrainer


def of_this_rank(trainer: Any) -> Any:
    """Return what trains in this process, where ranks train together."""
    return trainer.own if isinstance(trainer, LeadingTrainer) else trainer


def policy_of(trainer: Any) -> Any:
    return of_this_rank(trainer).policy


def body_of(trainer: Any) -> Any:
    return policy_of(trainer).body


def prepare(trainer: Any, batch: TrainBatch) -> Any:
    """Return what a step takes its gradient of."""
    return trainer.update.prepare(batch)


def prepared(trainer: Any) -> list[Any]:
    """Collect what each step from now on takes its gradient of, as they come."""
    update, seen = of_this_rank(trainer).update, []
    first = update.prepare

    def noted(batch: TrainBatch) -> Any:
        seen.append(first(batch))
        return seen[-1]

    update.prepare = noted
    return seen


def score(trainer: Any, batch: TrainBatch, role: Role) -> npt.NDArray[np.float32]:
    """[T] log-probs (for `value`: values) under one of the models that the trainer holds; 0.0 at the first token of each sequence."""
    wanted = np.ones(batch.num_tokens, np.bool_)
    wanted[batch.offsets[:-1]] = False
    if not isinstance(trainer, TableTrainer):
        return trainer.update.score(batch, role, wanted, np.arange(batch.num_samples))
    assert role is Role.POLICY
    found = np.zeros(batch.num_tokens, np.float32)
    found[wanted] = trainer._forward(batch, np.flatnonzero(wanted))[1]
    return found
