"""The sampling masks of SGLang (`return_sampling_mask`): the ids of what each token was drawn from, which its answers hold as lists.

An answer holds those of its new tokens at the end of its list, the likeliest id first. SGLang appends the token that was drawn where its
own count of what is kept leaves it out: FlashInfer breaks ties in another way, and sums in another order. Log-probs it says of the drawn
token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.errors import SchemaError
from streamrl.schemas.candidates import MOST_RECORDED, Candidates, CandidateSets, bounds_of


class Masks:
    """Those of one completion while its answers come in.

    Args:
        top_k: that it is drawn with: no mask has more than one id beyond it.
        vocab_size: ids are below it; 0: not known.
    """

    def __init__(self, top_k: int, vocab_size: int) -> None:
        self._top_k = top_k
        self._decode = msgspec.json.Decoder(list[list[int] | None] | None).decode
        self._vocab_size = vocab_size or 2**31
        self._rows: list[list[int]] = []
        self._total = 0

    def take(self, said: msgspec.Raw, tokens: Sequence[int], fresh: int) -> None:
        """The masks of an answer's first new `tokens`, of `fresh`.

        Raises:
            SchemaError: a token without a mask, or a mask that is none: without its token, with an id twice, outside the vocabulary, or
                of more ids than can be drawn.
        """
        if not tokens:
            return
        try:
            masks = (self._decode(said) if bytes(said) else None) or []
        except (msgspec.DecodeError, RecursionError) as error:
            raise SchemaError(f"output_token_sampling_mask is no list of lists of ids: {error}") from error
        masks = masks[len(masks) - fresh :] if len(masks) >= fresh else []
        if len(masks) != fresh:
            raise SchemaError(f"fewer masks than {fresh} new tokens in output_token_sampling_mask")
        for token, mask in zip(tokens, masks, strict=False):
            row = sorted(mask or ())
            if token not in row or len(set(row)) != len(row) or len(row) > self._top_k + 1 or row[0] < 0 or row[-1] >= self._vocab_size:
                raise SchemaError(f"a mask of {len(row)} ids, {row[:8]}, for token {token} drawn with top_k = {self._top_k}")
            self._total += len(row)
            self._rows.append(row if self._total <= MOST_RECORDED else [])

    def candidates(self) -> Candidates | None:
        """Of all tokens so far; None where there are none."""
        if not any(self._rows):
            return None
        ids = np.array([token for row in self._rows for token in row], np.int32)
        return Candidates.of(CandidateSets(bounds_of(np.array([len(row) for row in self._rows])), ids))
