"""The soft overlong penalty: what is added to the reward of answers near their greatest length, by length alone. Pure.

It is added where a batch is assembled, once, whoever gave the reward and however late; on the log, and for the filters of groups, rewards
are without it. So DAPO filters too: by accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.core.numbering import owner_of_sample
from streamrl.schemas.sample_batch import SampleBatch

Ints = npt.NDArray[np.int64]


def overlong_penalty(length: Ints, longest: Ints, *, buffer: int, penalty: float) -> npt.NDArray[np.float64]:
    """[N] 0 up to `longest - buffer` tokens, from there in equal steps down to -penalty at `longest`, and -penalty beyond.

    Equation 13 of arXiv 2503.14476, times `penalty`.

    Args:
        length: [N] tokens of each answer.
        longest: [N] L_max of each, in tokens.
        buffer: L_cache, at least 1.
        penalty: the greatest one, at least 0.

    Example: with L_max = 20 and a buffer of 4 tokens.

        >>> overlong_penalty(np.array([16, 17, 20, 99]), np.array([20] * 4), buffer=4, penalty=1.0).tolist()
        [0.0, -0.25, -1.0, -1.0]
    """
    over = np.clip(length - (longest - buffer), 0, buffer)
    return np.where(over > 0, -penalty * over / buffer, 0.0)


def sampled_tokens(message: SampleBatch) -> Ints:
    """[N] tokens of each sample that a model has drawn, trained or not."""
    drawn = np.where(message.span_number >= 0, message.span_length, 0)
    return np.add.reduceat(drawn, message.span_offsets[:-1], dtype=np.int64)


def of_rollouts(penalties: npt.NDArray[np.float64], tasks: Ints, rollouts: Ints, agents: Sequence[str] = ()) -> npt.NDArray[np.float64]:
    """[N] for each sample the greatest penalty among those that share its reward: of its rollout, or of its agent in the rollout.

    Args:
        penalties: [N], at most 0.
        tasks: [N]
        rollouts: [N]
        agents: [N], whose own reward a sample has, empty where it is the rollout's; none at all where no sample has an agent.
    """
    owner_N = owner_of_sample(tasks, rollouts, agents)
    greatest = np.zeros(len(penalties))
    np.minimum.at(greatest, owner_N, penalties)
    return greatest[owner_N]
