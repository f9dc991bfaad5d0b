"""Numbers for whose reward a sample has, and for whose rewards are compared. Pure.

Letters: `N` samples, `R` owners of a reward: rollouts, or where samples have agents with rewards of their own, each agent of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.schemas.samples import role_of

Ints = npt.NDArray[np.int64]


def owner_of_sample(tasks: Ints, rollouts: Ints, agents: Sequence[str] = ()) -> Ints:
    """[N] number of the owner of each sample's reward, 0 to R - 1, in ascending order of (task, rollout, agent).

    Args:
        tasks: [N]
        rollouts: [N]
        agents: [N], whose own reward a sample has, empty where it is the rollout's; none at all where no sample has an agent.
    """
    return _numbered(tasks, rollouts, _codes(agents)) if agents else _numbered(tasks, rollouts)


def group_of_owner(first_R: Ints, tasks: Ints, agents: Sequence[str] = ()) -> Ints:
    """[R] number of each owner's group, the owners of one task and one role, from 0, in ascending order of (task, role).

    Args:
        first_R: [R] a sample of each.
        tasks: [N]
        agents: [N], or none.
    """
    if not agents:
        return _numbered(tasks[first_R])
    return _numbered(tasks[first_R], _codes([role_of(agents[int(first)]) for first in first_R]))


def _numbered(*columns: Ints) -> Ints:
    """[n] number of each row, from 0, in ascending order of the rows."""
    _, found = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return found.reshape(-1).astype(np.int64)


def _codes(names: Sequence[str]) -> Ints:
    """[n] number of each name, in ascending order of names."""
    return np.unique(np.array(names), return_inverse=True)[1].reshape(-1).astype(np.int64)
