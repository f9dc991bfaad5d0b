"""What SGLang says that its tokens could have been: sampling masks (`return_sampling_mask`) and the likeliest (`top_logprobs_num`).

An answer holds those of its new tokens at the end of a list. A mask has the likeliest id first; the token that was drawn is appended
where SGLang's own count of what is kept leaves it out: FlashInfer breaks ties in another way, and sums in another order. Log-probs are
said of the drawn token alone. The likeliest are (log-prob, id, text) under what was drawn from before top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from streamrl.engines.wire import MetaInfo
from streamrl.errors import SchemaError
from streamrl.schemas.candidates import MOST_RECORDED, Candidates, CandidateSets, bounds_of

_masks = msgspec.json.Decoder(list[list[int] | None] | None).decode
_tops = msgspec.json.Decoder(list[list[tuple[float | None, int, Any]] | None] | None).decode


class _Said:
    """What is said of the tokens of one completion while its answers come in, as far as it is kept.

    Args:
        most: ids of a token, as they were asked for.
        vocab_size: ids are below it; 0: not known.
    """

    _has_logprobs: ClassVar[bool]

    def __init__(self, most: int, vocab_size: int) -> None:
        self._most = most
        self._vocab_size = vocab_size or 2**31
        self._rows: list[Mapping[int, float]] = []
        self._total = 0

    def candidates(self) -> Candidates | None:
        """Of all tokens so far; None where there are none."""
        if not any(self._rows):
            return None
        pairs = [pair for row in self._rows for pair in sorted(row.items())]
        ids, values = np.array(pairs, np.float64).T
        logprobs = values.astype(np.float32) if self._has_logprobs else None
        return Candidates.of(CandidateSets(bounds_of(np.array([len(row) for row in self._rows])), ids.astype(np.int32), logprobs))

    def _add(self, row: Mapping[int, float]) -> None:
        self._total += len(row)
        self._rows.append(row if self._total <= MOST_RECORDED else {})


class Masks(_Said):
    """Masks; `most` is top-k, and no mask has more than one id beyond it."""

    _has_logprobs = False

    def take(self, meta: MetaInfo, tokens: Sequence[int], logprobs: Sequence[float], fresh: int) -> None:
        """The masks of an answer's first new `tokens`, of `fresh`; the log-probs are not needed.

        Raises:
            SchemaError: a token without a mask, or a mask that is none: without its token, with an id twice, outside the vocabulary, or
                of more ids than can be drawn.
        """
        for token, mask in zip(tokens, _newest(meta.output_token_sampling_mask, _masks, "output_token_sampling_mask", fresh), strict=False):
            row: list[int] = sorted(mask or [])
            if token not in row or len(set(row)) != len(row) or len(row) > self._most + 1 or row[0] < 0 or row[-1] >= self._vocab_size:
                raise SchemaError(f"a mask of {len(row)} ids, {row[:8]}, for token {token} drawn with top_k = {self._most}")
            self._add(dict.fromkeys(row, 0.0))


class Likeliest(_Said):
    """The likeliest tokens at each place, and the one that was drawn."""

    _has_logprobs = True

    def take(self, meta: MetaInfo, tokens: Sequence[int], logprobs: Sequence[float], fresh: int) -> None:
        """Those of an answer's first new `tokens`, of `fresh`, which were drawn with `logprobs`.

        Raises:
            SchemaError: a token without any, or what no model says: an id twice, outside the vocabulary, more than were asked for, or a
                log-prob above 0.
        """
        found = _newest(meta.output_top_logprobs, _tops, "output_top_logprobs", fresh)
        for token, logprob, said in zip(tokens, logprobs, found, strict=False):
            ids = [one for _, one, _ in said or ()]
            least, most = min(ids, default=-1), max(ids, default=-1)
            if len(set(ids)) != len(ids) or len(ids) > self._most or least < 0 or most >= self._vocab_size:
                raise SchemaError(f"{len(ids)} likeliest tokens, {ids[:8]}, where {self._most} were asked for")
            # What a grammar or a bias rules out has no finite log-prob.
            row = {one: value for value, one, _ in said or () if value is not None and math.isfinite(value)}
            if max(row.values(), default=0.0) > 1e-4:
                raise SchemaError(f"a log-prob of {max(row.values())} among the likeliest tokens")
            self._add({**row, token: logprob})


def _newest(said: msgspec.Raw, decode: Any, name: str, fresh: int) -> list[Any]:
    """What a list of an answer says of its `fresh` new tokens."""
    try:
        found = (decode(said) if bytes(said) else None) or []
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{name} is no list of lists: {error}") from error
    if len(found) < fresh:
        raise SchemaError(f"{len(found)} entries for {fresh} new tokens in {name}")
    return found[len(found) - fresh :]
