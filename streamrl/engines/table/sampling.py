"""Drawing tokens by inverse CDF, in numpy: the `table` engine's sampler and the definition the others are tested against.

Letters: `n` rows, `V` vocabulary.

The distribution of a row is softmax(logits / temperature), restricted to a kept set and renormalised. With the tokens
sorted by falling probability (ties: the lower id first), a token is kept when its rank is below `top_k`, the mass of
the tokens before it, in the unrestricted distribution, is below `top_p`, and its probability is at least `min_p` times the
greatest one. So each of them looks at the unrestricted distribution, and the most probable token is always kept. Temperature 0
takes the most probable token; its log-prob is that under temperature 1.

Before the temperature the logits of a row that has an edit are changed: tokens that the completion has already by penalties
(subtracted, then scaled), those outside the grammar to -inf, and a bias is added, in SGLang's order.

The token drawn for `u` is the first, in order of ids, whose cumulative probability exceeds `u`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from streamrl.config.recording import Recording
from streamrl.engines.batching.edits import Edit
from streamrl.engines.batching.model import Drawn, Draws
from streamrl.schemas.candidates import CandidateSets, bounds_of


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n, V] to [n, V], natural logarithms."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def distribution(logits: npt.NDArray[np.floating], draws: Draws) -> npt.NDArray[np.float64]:
    """Log-probs [n, V] float64 of the distributions that `draws` draws from; -inf where a token is not kept.

    Greedy rows hold the log-probs under temperature 1.
    """
    temperature = np.where(draws.temperature > 0, draws.temperature, 1.0).astype(np.float64)
    logp = log_softmax(_edited(logits.astype(np.float64), draws.edits) / temperature[:, None])
    rows = np.flatnonzero(draws.restricted)
    if len(rows):
        logp[rows] = _restrict(logp[rows], draws.top_p[rows], draws.top_k[rows], draws.min_p[rows])
    return logp


def _edited(logits: npt.NDArray[np.float64], edits: Mapping[int, Edit]) -> npt.NDArray[np.float64]:
    """Changed in place, and given back."""
    for row, edit in edits.items():
        own = logits[row]
        if len(edit.seen):
            lowered = own[edit.seen] - edit.taken
            own[edit.seen] = np.where(lowered < 0, lowered * edit.repetition, lowered / edit.repetition)
        if edit.allowed is not None:
            own[~edit.allowed] = -np.inf
        own[edit.bias_ids] += edit.bias_values
    return logits


def draw(logits: npt.NDArray[np.floating], draws: Draws, recording: Recording) -> Drawn:
    """Draw one token a row; `recording`: what is to be said of them."""
    logp = distribution(logits, draws)
    cumulative = np.exp(logp).cumsum(axis=-1)
    total = cumulative[:, -1]
    # Below the total even when u * total rounds up to it, so that a token of probability 0 is never drawn.
    target = np.minimum(draws.uniform * total, np.nextafter(total, 0.0))
    ids = np.minimum((cumulative <= target[:, None]).sum(axis=-1), logits.shape[-1] - 1)
    greedy = draws.temperature <= 0
    if greedy.any():
        ids[greedy] = logp[greedy].argmax(axis=-1)
    found = np.take_along_axis(logp, ids[:, None], axis=-1)[:, 0].astype(np.float32)
    return Drawn(ids, found, _candidates(logp, ids, draws, recording) if recording.anything else None)


def _candidates(logp: npt.NDArray[np.float64], ids: npt.NDArray[np.int64], draws: Draws, recording: Recording) -> CandidateSets:
    """What `recording` asks for, of rows that are not greedy."""
    kept = np.zeros(logp.shape, np.bool_)
    if recording.support:
        kept |= draws.restricted[:, None]
    if recording.top:
        rows = np.flatnonzero(~draws.restricted & (draws.temperature > 0))
        kept[rows[:, None], np.argsort(-logp[rows], axis=-1, kind="stable")[:, : recording.top]] = True
        kept[rows, ids[rows]] = True
    kept &= np.isfinite(logp)
    found = logp[kept].astype(np.float32) if recording.logprobs else None  # row by row, ids rising
    return CandidateSets(bounds_of(kept.sum(-1)), np.nonzero(kept)[1].astype(np.int32), found)


def _restrict(
    logp: npt.NDArray[np.float64], top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int64], min_p: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    vocabulary = logp.shape[-1]
    order = np.argsort(-logp, axis=-1, kind="stable")
    mass = np.exp(np.take_along_axis(logp, order, axis=-1))
    before = mass.cumsum(axis=-1) - mass
    rank = np.arange(vocabulary)
    limit = np.where(top_k > 0, top_k, vocabulary)
    kept = (rank < limit[:, None]) & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    kept &= mass >= min_p[:, None] * mass[:, :1]
    kept[:, 0] = True
    kept_mass = np.where(kept, mass, 0.0).sum(axis=-1, keepdims=True)
    result = np.full_like(logp, -np.inf)
    values = np.where(kept, np.take_along_axis(logp, order, axis=-1) - np.log(kept_mass), -np.inf)
    np.put_along_axis(result, order, values, axis=-1)
    return result
