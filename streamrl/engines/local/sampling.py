"""Drawing tokens by inverse CDF, in torch: the `local` engine's sampler. The definition is in `streamrl.engines.table.sampling`.

Letters: `n` rows, `V` vocabulary. One uniform number a row, one cumulative sum and one search: 4 to 6 times cheaper on a
CPU than `torch.multinomial` or Gumbel noise at V = 151,936.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.config.recording import Recording
from streamrl.engines.batching.edits import Edit
from streamrl.engines.batching.model import Drawn, Draws
from streamrl.schemas.candidates import CandidateSets, bounds_of


def draw(logits: Tensor, draws: Draws, recording: Recording) -> Drawn:
    """Draw one token a row.

    Args:
        logits: [n, V], any floating type; computed with in float32, cumulated in float64.
        draws: how, n rows.
        recording: what is to be said of the tokens.
    """
    logp = log_probs(logits, draws)
    cumulative = torch.cumsum(torch.exp(logp), -1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Below the total even when u * total rounds up to it, so that a token of probability 0 is never drawn.
    target = torch.minimum(_on(draws.uniform, logits) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    greedy = draws.temperature <= 0
    if greedy.any():
        rows = _on(np.flatnonzero(greedy), logits)
        ids[rows] = logp[rows].argmax(-1, keepdim=True)
    chosen = torch.gather(logp, -1, ids)
    # A row with a NaN has a NaN total whichever token was found.
    chosen = torch.where(torch.isfinite(total)[:, None], chosen, torch.nan)
    candidates = _candidates(logp, ids, draws, recording) if recording.anything else None
    return Drawn(ids[:, 0].cpu().numpy(), chosen[:, 0].cpu().numpy(), candidates)


def _candidates(logp: Tensor, ids: Tensor, draws: Draws, recording: Recording) -> CandidateSets:
    """What `recording` asks for, of rows that are not greedy."""
    kept = torch.zeros_like(logp, dtype=torch.bool)
    if recording.support:
        kept |= _on(draws.restricted, logp)[:, None]
    rows = np.flatnonzero(~draws.restricted & (draws.temperature > 0)) if recording.top else ()
    if len(rows):
        index = _on(np.asarray(rows), logp)
        likeliest = logp[index].topk(min(recording.top, logp.shape[-1])).indices
        kept[index[:, None], torch.cat([likeliest, ids[index]], 1)] = True
    kept &= torch.isfinite(logp)
    found = logp[kept].cpu().numpy() if recording.logprobs else None  # row by row, ids rising
    return CandidateSets(bounds_of(kept.sum(-1).cpu().numpy()), kept.nonzero()[:, 1].int().cpu().numpy(), found)


def log_probs(logits: Tensor, draws: Draws) -> Tensor:
    """Log-probs [n, V] float32 of the distributions drawn from; -inf where a token is not kept. Greedy rows: temperature 1."""
    logits = _edited(logits.float(), draws.edits)
    temperature = draws.temperature
    if (temperature != 1).any():
        logits = logits / _on(np.where(temperature > 0, temperature, np.float32(1)), logits)[:, None]
    logp = torch.log_softmax(logits, -1)
    rows = np.flatnonzero(draws.restricted)
    if len(rows):
        index = _on(rows, logits)
        logp[index] = _restrict(logp[index], *(_on(bound[rows], logits) for bound in (draws.top_p, draws.top_k, draws.min_p)))
    return logp


def _edited(logits: Tensor, edits: Mapping[int, Edit]) -> Tensor:
    """A changed copy, where there is anything to change."""
    if edits:
        logits = logits.clone()
    for row, edit in edits.items():
        own = logits[row]
        if len(edit.seen):
            seen = _on(edit.seen, logits)
            lowered = own[seen] - _on(edit.taken, logits)
            own[seen] = torch.where(lowered < 0, lowered * edit.repetition, lowered / edit.repetition)
        if edit.allowed is not None:
            own.masked_fill_(~_on(edit.allowed, logits), -torch.inf)
        if len(edit.bias_ids):
            own[_on(edit.bias_ids, logits)] += _on(edit.bias_values, logits)
    return logits


def _restrict(logp: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    vocabulary = logp.shape[-1]
    ordered, order = torch.sort(logp, dim=-1, descending=True, stable=True)
    mass = torch.exp(ordered.double())
    before = mass.cumsum(-1) - mass
    limit = torch.where(top_k > 0, top_k, vocabulary)
    rank = torch.arange(vocabulary, device=logp.device)
    kept = (rank < limit[:, None]) & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    kept &= mass >= min_p[:, None] * mass[:, :1]
    kept[:, 0] = True
    kept_mass = torch.where(kept, mass, 0.0).sum(-1, keepdim=True)
    values = torch.where(kept, (ordered - kept_mass.log()).float(), -torch.inf)
    return torch.empty_like(logp).scatter_(-1, order, values)


def _on(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
