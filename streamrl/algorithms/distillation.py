"""On-policy distillation: the student learns, on its own tokens, to go where a teacher would. Without torch, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def distill(
    advantages: Floats, logprobs: Floats, teacher: Floats, loss_mask: npt.NDArray[np.bool_], *, coef: float
) -> tuple[Floats, Floats]:
    """A_t - coef (log pi - log teacher): advantages [T] and the estimate of the reverse KL that was taken, [T] (arXiv 2306.13649).

    At tokens that pi sampled, log pi - log teacher has the reverse KL(pi || teacher) as its mean. It is a constant to the loss, as
    every advantage is.

    Args:
        advantages: [T]
        logprobs: [T] the student's before the batch; read under the mask only.
        teacher: [T] the teacher's; read under the mask only.
        loss_mask: [T]; outside it advantages stay and the estimate is 0.
        coef: weight of the term.
    """
    reverse_kl = np.zeros(len(advantages))
    reverse_kl[loss_mask] = np.asarray(logprobs, np.float64)[loss_mask] - np.asarray(teacher, np.float64)[loss_mask]
    return advantages - coef * reverse_kl, reverse_kl
