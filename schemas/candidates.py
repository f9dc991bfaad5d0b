"""Candidates: the tokens that a sampler could have drawn at a place, or held for the likeliest, as it drew there.

Of a token that was drawn from a part of the vocabulary (top-k, top-p, min-p) they are that part, its support: all of it, whatever its
size. Of one that was drawn from the whole vocabulary they are the likeliest, and the token itself.
Letters: `T` tokens, `S` candidates of all of them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError

MOST_RECORDED = 1 << 22
"""Candidates of one completion that an engine keeps: 16 MiB of ids. A token beyond has none; a model that has learnt something has a
handful a token."""
_SLACK = 1e-3
"""What rounding may do to a log-prob, and to probabilities that add up to 1."""
Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


class CandidateSets(msgspec.Struct, frozen=True):
    """Of T tokens, as arrays: those of token t are `ids[bounds[t] : bounds[t + 1]]`; none where nothing was recorded."""

    bounds: npt.NDArray[np.int64]
    """[T + 1], from 0 to S."""
    ids: Ids
    """[S]; rising within a token."""
    logprobs: Logprobs | None = None
    """[S] under the distribution that was drawn from; None: they were not asked for."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.bounds) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[T] candidates of each token."""
        return np.diff(self.bounds)

    def at(self, tokens: npt.NDArray[np.int64]) -> CandidateSets:
        """Of these tokens, in this order; -1: of one that has none."""
        counts = np.where(tokens < 0, 0, self.counts[tokens]) if self.num_tokens else np.zeros(len(tokens), np.int64)
        bounds = bounds_of(counts)
        # Candidate k of the result's token m is candidate bounds[tokens[m]] + (k - bounds'[m]) of these.
        starts = np.where(counts > 0, self.bounds[tokens], 0)
        places = np.repeat(starts - bounds[:-1], counts) + np.arange(bounds[-1])
        return CandidateSets(bounds, self.ids[places], None if self.logprobs is None else self.logprobs[places])

    def without(self, dropped: npt.NDArray[np.bool_]) -> CandidateSets:
        """The same, with none where `dropped` [T] is."""
        return self.at(np.where(dropped, -1, np.arange(self.num_tokens)))


class Candidates(msgspec.Struct, frozen=True):
    """The same as bytes: on the way from an engine, and in a rollout's blob. All little-endian."""

    counts: bytes
    """uint32, of each token."""
    ids: bytes
    """int32, those of one token after those of the one before."""
    logprobs: bytes = b""
    """float32; empty: not asked for."""

    @classmethod
    def of(cls, sets: CandidateSets) -> Candidates:
        """From arrays."""
        logprobs = b"" if sets.logprobs is None else sets.logprobs.astype("<f4").tobytes()
        return cls(sets.counts.astype("<u4").tobytes(), sets.ids.astype("<i4").tobytes(), logprobs)

    def sets(self) -> CandidateSets:
        """As arrays, in no more memory than the bytes have, and 8 bytes a token.

        Raises:
            SchemaError: the three do not fit together.
        """
        sizes = len(self.counts), len(self.ids), len(self.logprobs)
        if any(size % 4 for size in sizes) or sizes[2] not in (0, sizes[1]):
            raise SchemaError(f"expected candidates of 4 bytes a count, an id and a log-prob, got {sizes} bytes", sizes=sizes)
        counts = np.frombuffer(self.counts, "<u4")
        total = int(counts.sum(dtype=np.int64))
        if total * 4 != sizes[1]:
            raise SchemaError(f"expected {total} candidates of {len(counts)} tokens, got {sizes[1] // 4}", expected=total)
        logprobs = np.frombuffer(self.logprobs, "<f4") if self.logprobs or not total else None
        return CandidateSets(bounds_of(counts), np.frombuffer(self.ids, "<i4"), logprobs)

    def texts(self) -> tuple[str, str, str]:
        """The three in base64."""
        return tuple(base64.b64encode(data).decode() for data in (self.counts, self.ids, self.logprobs))  # type: ignore[return-value]

    @classmethod
    def from_texts(cls, *texts: str) -> Candidates:
        """What `texts` gave, read again; raises SchemaError when it is not."""
        try:
            found = cls(*(base64.b64decode(text, validate=True) for text in texts))
        except binascii.Error as error:
            raise SchemaError(f"expected candidates in base64, got: {error}") from error
        found.sets()
        return found

    def part(self, start: int, stop: int) -> Candidates:
        """Of tokens `start` to `stop`."""
        counts = np.frombuffer(self.counts, "<u4")
        first, end = (4 * int(counts[:place].sum(dtype=np.int64)) for place in (start, stop))
        return Candidates(self.counts[4 * start : 4 * stop], self.ids[first:end], self.logprobs[first:end])


def bounds_of(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[T + 1] from [T]."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def no_candidates(tokens: int) -> CandidateSets:
    """Of so many tokens."""
    return CandidateSets(np.zeros(tokens + 1, np.int64), np.zeros(0, np.int32))


def joined(parts: Sequence[CandidateSets]) -> CandidateSets:
    """Those of one text after those of another; with log-probs where all parts that have candidates have them."""
    known = all(part.logprobs is not None for part in parts if len(part.ids))
    logprobs = [np.zeros(0, np.float32), *(part.logprobs for part in parts if part.logprobs is not None)]
    return CandidateSets(
        bounds_of(np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])),
        np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
        np.concatenate(logprobs) if known else None,
    )


def candidates_problem(
    sets: CandidateSets, tokens: Ids, logprobs: Logprobs, restricted: npt.NDArray[np.bool_], *, vocab_size: int, likely: bool
) -> str:
    """What is wrong with what a sample's tokens say of their candidates; empty: nothing.

    Args:
        sets: of the tokens.
        tokens: [T] ids.
        logprobs: [T] with which they were drawn.
        restricted: [T] whether a token was drawn from a part of the vocabulary: then its candidates are all that could be drawn.
        vocab_size: ids are below it; 0: not known.
        likely: log-probs are needed.
    """
    counts, ids = sets.counts, sets.ids
    rows = np.repeat(np.arange(len(counts)), counts)
    if len(counts) != len(tokens):
        return f"expected candidates of {len(tokens)} tokens, got those of {len(counts)}"
    if len(ids) and (int(ids.min()) < 0 or (vocab_size and int(ids.max()) >= vocab_size)):
        return f"expected ids in 0 .. {vocab_size - 1 if vocab_size else 'the vocabulary'}, got {ids.min()} to {ids.max()}"
    if ((np.diff(ids) <= 0) & (rows[1:] == rows[:-1])).any():
        return "expected the ids of a token's candidates in rising order, each once"
    own = np.zeros(len(counts), np.bool_)
    own[rows[ids == tokens[rows]]] = True
    if not own[counts > 0].all():
        return f"expected a token among its own candidates, got token {int(np.flatnonzero(~own & (counts > 0))[0])} that is not"
    if sets.logprobs is None:
        return "expected log-probs of the candidates, got none" if likely and len(ids) else ""
    if not (np.isfinite(sets.logprobs).all() and (sets.logprobs <= _SLACK).all()):
        return "expected finite log-probs of at most 0"
    mass = np.bincount(rows, np.exp(sets.logprobs.astype(np.float64)), len(counts))
    whole = restricted & (counts > 0)
    if (mass > 1 + _SLACK).any() or (whole & (mass < 1 - _SLACK)).any():
        return "expected the probabilities of a token's candidates to add up to at most 1, and to 1 where they are all that could be drawn"
    said = np.abs(sets.logprobs[ids == tokens[rows]] - logprobs[counts > 0])
    return "expected the log-prob that a token was drawn with among its candidates, got another" if (said > _SLACK).any() else ""
