"""Mean 0 and deviation 1 over all trained tokens of a batch, wherever they lie. In float64 and without torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamrl.errors import TrainingError

VARIANCE_EPSILON = 1e-8

Reduce = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""The element-wise sum of an array over ranks; every rank calls it with the same shape, as often."""


def whiten(values: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_], *, reduce: Reduce | None = None) -> npt.NDArray[np.float64]:
    """(x - mean) / sqrt(variance + 1e-8) under the mask, 0 outside it; the variance is the unbiased one (n - 1).

    A single value gives 0. The deviations are summed in a second pass, after the mean is known, so a large mean costs no digits.

    Args:
        values: [T] those of this rank; read under the mask only.
        mask: [T]
        reduce: sums over ranks where each holds other tokens; called twice. None: they are all here.

    Raises:
        TrainingError: no token of any rank is under the mask.
    """
    sums = np.array([values[mask].sum(), mask.sum()], np.float64)
    total, count = sums if reduce is None else reduce(sums)
    if count == 0:
        raise TrainingError("whitening expects trained tokens, this batch has none", hint="was everything masked out of it?")
    centred = np.zeros(len(values))
    centred[mask] = values[mask] - total / count
    squares = np.array([np.square(centred).sum()])
    variance = float((squares if reduce is None else reduce(squares))[0]) / max(count - 1, 1)
    return centred / np.sqrt(variance + VARIANCE_EPSILON)
