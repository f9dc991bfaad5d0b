"""Whether consecutive optimizer steps go the same way: the cosine between their gradients, over all parameters of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from streamrl.trainers.torch.parallel import Parallel


class Direction:
    """Keeps the last gradient: 4 bytes for each parameter that this rank holds. It is in no checkpoint, and decides nothing.

    Args:
        parallel: the ranks that hold the parameters.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._last: tuple[str, float, list[Tensor]] | None = None

    def turned(self, kind: str, gradients: Sequence[Tensor]) -> float | None:
        """The cosine between these gradients, before clipping, and those of the last call; all ranks call it and get the same.

        Args:
            kind: of the batch; between kinds there is no cosine, for the loss is another.
            gradients: summed over ranks, of the parts that this rank holds, always in the same order; they are copied.

        Returns:
            None: there is nothing to compare with, or one of the two is 0 or not finite.
        """
        norm, last = math.sqrt(self._parallel.dot(gradients, gradients)), self._last
        found = None
        if last is not None and last[0] == kind and norm > 0 and last[1] > 0:
            cosine = self._parallel.dot(gradients, last[2]) / (norm * last[1])
            found = max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None
        if not math.isfinite(norm):
            self._last = None
        elif last is None:
            self._last = (kind, norm, [gradient.clone() for gradient in gradients])
        else:
            for kept, gradient in zip(last[2], gradients, strict=True):
                kept.copy_(gradient)
            self._last = (kind, norm, last[2])
        return found
