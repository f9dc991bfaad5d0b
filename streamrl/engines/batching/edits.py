"""What a completion's logits are changed by before its temperature, and what ends it beside stop tokens: its state, token by token."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.engines.grammars import Grammar
from streamrl.engines.texts import StopText
from streamrl.schemas.tasks import Sampling


class Edit(msgspec.Struct, frozen=True):
    """Changes of one row's logits, in this order."""

    seen: npt.NDArray[np.int64]
    """[m] different tokens that the completion has; empty where none is penalized."""
    taken: npt.NDArray[np.float32]
    """[m] subtracted from their logits."""
    repetition: float
    """Their logits are then multiplied by it where they are below 0, else divided by it."""
    allowed: npt.NDArray[np.bool_] | None
    """[V] tokens that the grammar leaves; None: all."""
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    """Added to the logits of `bias_ids`."""


class Editor:
    """One completion's. Owned by the decode thread.

    Args:
        sampling: of the request.
        stop: finds its stop strings, None without any.
        grammar: at its beginning, None without one.
    """

    def __init__(self, sampling: Sampling, stop: StopText | None, grammar: Grammar | None) -> None:
        self._sampling = sampling
        self._stop = stop
        self._grammar = grammar
        bias = sorted(sampling.logit_bias.items())
        self._bias_ids = np.array([token for token, _ in bias], np.int64)
        self._bias_values = np.array([value for _, value in bias], np.float32)
        self._places: dict[int, int] = {}
        self._seen = np.zeros(64 if sampling.penalized else 0, np.int64)
        self._counts = np.zeros(len(self._seen), np.int64)
        self.matched = ""
        """The stop string that has come."""

    @property
    def problem(self) -> str:
        """Why it cannot go on, or an empty text."""
        return "" if self._grammar is None else self._grammar.problem

    def edit(self) -> Edit:
        """Of the next token's logits."""
        seen, counts = self._seen[: len(self._places)], self._counts[: len(self._places)]
        sampling = self._sampling
        taken = (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
        allowed = None if self._grammar is None else self._grammar.allowed()
        return Edit(seen, taken, sampling.repetition_penalty, allowed, self._bias_ids, self._bias_values)

    def take(self, token: int) -> bool:
        """The token that came; returns whether it completes a stop string."""
        if self._sampling.penalized:
            self._count(token)
        if self._grammar is not None:
            self._grammar.take(token)
        if self._stop is not None:
            self.matched = self._stop.take(token)
        return bool(self.matched)

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._seen):
            self._seen, self._counts = (np.concatenate([array, np.zeros_like(array)]) for array in (self._seen, self._counts))
        self._seen[place] = token
        self._counts[place] += 1
