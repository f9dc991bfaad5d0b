"""What must be known about a batch's tokens before its first optimizer step, and how models are run over a batch to know it.

Letters: `T` tokens of the batch, `M` tokens that a micro-batch predicts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.token_advantages import Role, needed_scores
from streamrl.config.loss import is_function
from streamrl.config.tree import LossConfig, TrainerConfig
from streamrl.core.balance import split_ranks
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import Indices, MicroBatch, plan_micro_batches
from streamrl.trainers.torch.parallel import DataParallel
from streamrl.trainers.torch.reproducible import reproducible

Predict = Callable[[MicroBatch], Tensor]
"""One number for each token that the micro-batch predicts, [M]."""


def needed_roles(batch: TrainBatch, loss: LossConfig, steps: int) -> frozenset[Role]:
    """Whose scores a batch needs before the first of its `steps` optimizer steps. With one step the policy itself is pi_proximal."""
    if batch.kind == "sft":
        return frozenset()
    roles = set(needed_scores(loss))
    recomputed = loss.proximal == "recomputed" and loss.correction.ratio == "proximal"
    if (steps > 1 and recomputed) or loss.correction.normalize or loss.slime_loss or is_function(loss.advantage):
        roles.add(Role.PROXIMAL)
    if loss.kl.loss_coef > 0:
        roles.add(Role.REFERENCE)
    return frozenset(roles)


class Scorer:
    """Lays batches out in micro-batches and runs models over them without gradients; every rank its share, all get the whole."""

    def __init__(self, config: TrainerConfig, parallel: DataParallel, *, deterministic: bool) -> None:
        self._budget = config.micro_tokens
        self._parallel = parallel
        self._deterministic = deterministic

    def micro_batches(
        self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices, *, free_masks: bool, width: int
    ) -> list[MicroBatch]:
        """This rank's share of `samples`, laid out for a model that can (`free_masks`) or cannot be masked freely."""
        return plan_micro_batches(
            batch,
            wanted,
            split_ranks(batch, samples, self._parallel.ranks, width=width)[self._parallel.rank],
            budget=self._budget,
            share_prefixes=free_masks,
            several_per_row=free_masks,
            width=width,
        )

    def score(
        self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices, predict: Predict, *, free_masks: bool, width: int
    ) -> npt.NDArray[np.float32]:
        """[T] what `predict` gives for the `wanted` tokens of `samples`; 0 elsewhere."""
        found = torch.zeros(batch.num_tokens)
        with torch.no_grad(), reproducible(self._deterministic):
            for micro in self.micro_batches(batch, wanted, samples, free_masks=free_masks, width=width):
                found[torch.from_numpy(micro.target)] = predict(micro).float().cpu()
        return self._parallel.sum(found).numpy()


def predictable(batch: TrainBatch) -> npt.NDArray[np.bool_]:
    """[T] all tokens but each sequence's first, which nothing predicts."""
    wanted = np.ones(batch.num_tokens, np.bool_)
    wanted[batch.offsets[:-1]] = False
    return wanted
