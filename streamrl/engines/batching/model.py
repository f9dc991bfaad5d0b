"""What the decode loop asks of a policy: weights in two buffers, rows that join and move, one token for every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.engines.batching.buffers import TensorLayout
from streamrl.engines.batching.edits import Edit
from streamrl.schemas.candidates import CandidateSets
from streamrl.schemas.experts import RoutedExperts


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token of each of `n` rows is drawn."""

    uniform: npt.NDArray[np.float64]
    """[n], in [0, 1)"""
    temperature: npt.NDArray[np.float32]
    """[n]; 0 is greedy"""
    top_p: npt.NDArray[np.float32]
    """[n]; 1 is off"""
    top_k: npt.NDArray[np.int64]
    """[n]; -1 is off"""
    min_p: npt.NDArray[np.float32]
    """[n]; 0 is off"""
    edits: Mapping[int, Edit] = {}
    """By row, what its logits are changed by before all this."""

    @property
    def restricted(self) -> npt.NDArray[np.bool_]:
        """[n] whether the row's token is drawn from a part of the vocabulary."""
        return ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)) & (self.temperature > 0)

    def row(self, index: int) -> Draws:
        """The draw of one row (n = 1)."""
        part = slice(index, index + 1)
        return Draws(
            uniform=self.uniform[part],
            temperature=self.temperature[part],
            top_p=self.top_p[part],
            top_k=self.top_k[part],
            min_p=self.min_p[part],
            edits={0: self.edits[index]} if index in self.edits else {},
        )


class Drawn(NamedTuple):
    """The next token of each of `n` rows."""

    ids: npt.NDArray[np.int64]
    """[n]"""
    logprobs: npt.NDArray[np.float32]
    """[n] of the distribution drawn from; NaN where the logits were not finite."""
    candidates: CandidateSets | None = None
    """Of the n tokens; None: they are not recorded."""


class DecodeModel(Protocol):
    """A policy under decoding. All methods but `prepare` are called by the decode thread."""

    vocab_size: int
    max_len: int
    """Longest sequence in tokens, prompt included."""
    eos_ids: tuple[int, ...]
    layout: tuple[TensorLayout, ...]
    """Parameters in the order their bytes lie in a buffer."""

    def bind(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Take the two weight buffers (called once, before the thread starts); parameters are views of them, or copies."""
        ...

    def prepare(self, index: int) -> None:
        """Buffer `index` has new bytes and is not being served: derive what decoding needs. Called in the background."""
        ...

    def activate(self, index: int) -> None:
        """Serve buffer `index` from the next forward pass on: a pointer flip."""
        ...

    def thread(self) -> AbstractContextManager[None]:
        """Entered by the decode thread for its whole life."""
        ...

    def join(self, rows: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> None:
        """Rows begin with these prompts. The last prompt token is not processed: it is the row's first input of `step`."""
        ...

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Row `sources[i]` becomes row `targets[i]`; no row is in both."""
        ...

    def experts(self, row: int) -> RoutedExperts | None:
        """Where the tokens of a row went that have been processed, from the first on; None where that is not kept."""
        ...

    def step(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        drawn: npt.NDArray[np.int64],
        draws: Draws,
    ) -> Drawn:
        """One forward pass over n rows.

        Args:
            tokens: [n] input tokens.
            positions: [n] their positions in the sequence, from 0.
            drawn: [n] tokens drawn so far, that is the response position of the token to draw.
            draws: how to draw.
        """
        ...
