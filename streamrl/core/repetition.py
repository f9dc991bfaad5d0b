"""How much an answer repeats itself, measured on its token ids: the same number on every machine, and no text is needed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from streamrl.schemas.sample_batch import SampleBatch


def repetition(tokens: npt.NDArray[np.integer], ngram: int) -> float:
    """Part of the n-grams that have been there before, 1 - distinct / all: seq-rep-n of arXiv 1908.04319.

    0 where no n-gram occurs twice, towards 1 in a loop; 0 for fewer than n + 1 tokens.

    Args:
        tokens: [M]
        ngram: n, at least 1.

    Example: of the 2-grams ab, bc, ca, ab and bc two have been there before.

        >>> repetition(np.array([1, 2, 3, 1, 2, 3]), 2)
        0.4
    """
    number = len(tokens) - ngram + 1
    if number < 2:
        return 0.0
    data, size = np.lib.stride_tricks.sliding_window_view(tokens, ngram).tobytes(), ngram * tokens.itemsize
    return 1.0 - len({data[at : at + size] for at in range(0, len(data), size)}) / number


class Tails:
    """The ends of a message's answers, as far as they are measured.

    Args:
        batch: the message.
    """

    def __init__(self, batch: SampleBatch) -> None:
        self._batch: SampleBatch | None = batch
        self._found: dict[tuple[int, int], Mapping[int, float]] = {}

    def repetition(self, ngram: int, window: int) -> Mapping[int, float]:
        """By rollout, the most that one of its samples repeats itself in its last `window` trained tokens.

        Raises:
            AssertionError: it has been `settled` and was not measured so before.
        """
        if (ngram, window) not in self._found:
            assert self._batch is not None, "measured before the tokens were let go"
            self._found[ngram, window] = _measured(self._batch, ngram, window)
        return self._found[ngram, window]

    def settled(self) -> Tails:
        """Let go of the tokens; what has been measured stays."""
        self._batch = None
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tails) or self._batch is None or other._batch is None:
            return self is other
        return np.array_equal(self._batch.tokens, other._batch.tokens) and np.array_equal(self._batch.loss_mask, other._batch.loss_mask)

    __hash__ = None  # type: ignore[assignment]


def _measured(batch: SampleBatch, ngram: int, window: int) -> Mapping[int, float]:
    found: dict[int, float] = {}
    bounds = batch.offsets.tolist()
    for row, rollout in enumerate(batch.rollouts.tolist()):
        tokens = batch.tokens[bounds[row] : bounds[row + 1]]
        answer = tokens[batch.loss_mask[bounds[row] : bounds[row + 1]] != 0][-window:]
        found[rollout] = max(found.get(rollout, 0.0), repetition(answer, ngram))
    return found
