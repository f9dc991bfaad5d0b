"""Returns and advantages of tokens: discounted returns, GAE, V-trace. Over packed sequences, in float64 and without torch.

Letters: `T` tokens of a batch, `M` steps. Sample n's tokens are [offsets[n], offsets[n + 1]). A *step* is a token under the mask: only
those are actions, only their rewards and values are read, and only they get a result; the others get 0. Time goes by in tokens: between
a step and the next one that stands d tokens behind it (d > 1 where a tool's answer lies between) the discount is gamma^d. After a
sample's last step nothing follows, V = 0; or, where a length limit truncated the sample, the value of the state behind its last token does.

Behind all of them is one recurrence, x_t = terms_t + factors_t x_{t+1} from the last t to the first (`scan`). A factor of 0 at the last
token of a sequence keeps sequences apart, so a whole packed batch is one scan. Letters: `M` steps, `C` chunks.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.config.loss import MAX_LOG_RATIO

Floats = npt.NDArray[np.float64]

CHUNK = 128
_SQUARE = 64


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a packed batch, in order."""

    index: npt.NDArray[np.int64]
    """[M] token that each step is."""
    discount: Floats
    """[M] what the next step of the sample counts, gamma^d; 0 at its last."""

    behind: Floats
    """[M] at a sample's last step gamma^d, for the d tokens to the sample's end; 0 at the others."""
    sample: npt.NDArray[np.int64]
    """[M] sample that each step is of."""

    def following(self, values: Floats) -> Floats:
        """[M] of each step the value of the next one; what stands at a sample's last step is multiplied by a discount of 0."""
        return np.append(values[1:], 0.0)

    def ahead(self, values: Floats, ends: Floats | None) -> Floats:
        """[M] the discounted value of what follows each step: the next one's of `values` [M], at a sample's last step its `ends` [N]."""
        found = self.discount * self.following(values)
        return found if ends is None else found + self.behind * ends[self.sample]

    def scatter(self, values: Floats, num_tokens: int) -> Floats:
        """[T] the values [M] at their tokens, 0 elsewhere."""
        found = np.zeros(num_tokens)
        found[self.index] = values
        return found


def find_steps(offsets: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_], gamma: float) -> Steps:
    """The tokens under the mask and the discounts between them.

    Args:
        offsets: [N + 1]
        loss_mask: [T]
        gamma: discount a token.
    """
    index = np.flatnonzero(loss_mask)
    owner = np.searchsorted(offsets, index, side="right")
    discount, behind = np.zeros(len(index)), np.zeros(len(index))
    if len(index):
        last = np.append(owner[1:] != owner[:-1], True)
        discount[:-1] = np.where(last[:-1], 0.0, gamma ** np.diff(index).astype(np.float64))
        behind = np.where(last, gamma ** (offsets[owner] - index).astype(np.float64), 0.0)
    return Steps(index=index, discount=discount, behind=behind, sample=owner - 1)


def discounted_returns(rewards: Floats, offsets: npt.NDArray[np.int64], *, gamma: float) -> Floats:
    """[T] G_t = r_t + gamma G_{t+1} over all tokens of each sample; REINFORCE++'s returns (arXiv 2501.03262).

    Args:
        rewards: [T], 0 where a token has none.
        offsets: [N + 1]
        gamma: discount a token.
    """
    factors = np.full(len(rewards), gamma)
    factors[offsets[1:][np.diff(offsets) > 0] - 1] = 0.0
    return scan(np.asarray(rewards, np.float64), factors)


def gae(
    rewards: Floats,
    values: Floats,
    offsets: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.bool_],
    *,
    gamma: float,
    gae_lambda: float,
    ends: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages [T] and returns [T].

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, returns_t = A_t + V_t.

    Args:
        rewards: [T]
        values: [T], V of the state before each token.
        offsets: [N + 1]
        loss_mask: [T]
        gamma: discount a token.
        gae_lambda: lambda, once a step.
        ends: [N], V of the state behind each sample's last token, 0 where the episode is over; None: all are.
    """
    steps = find_steps(offsets, loss_mask, gamma)
    value_M = np.asarray(values, np.float64)[steps.index]
    delta_M = rewards[steps.index] + steps.ahead(value_M, ends) - value_M
    advantage_M = scan(delta_M, steps.discount * gae_lambda)
    return steps.scatter(advantage_M, len(rewards)), steps.scatter(advantage_M + value_M, len(rewards))


def vtrace(
    rewards: Floats,
    values: Floats,
    log_ratio: Floats,
    offsets: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.bool_],
    *,
    gamma: float,
    gae_lambda: float,
    rho: float,
    c: float,
    ends: Floats | None = None,
) -> tuple[Floats, Floats]:
    """V-trace (arXiv 1802.01561): advantages [T], and targets [T] for the critic that do not depend on which policy sampled the tokens.

    With rho_t = min(rho, pi/mu), c_t = lambda min(c, pi/mu) and delta_t = rho_t (r_t + gamma V_{t+1} - V_t):
    v_t - V_t = delta_t + gamma c_t (v_{t+1} - V_{t+1}) are the targets, and A_t = r_t + gamma v_{t+1} - V_t the advantages.
    The paper's policy gradient is rho_t A_t: its weight is the loss's off-policy correction, and is not part of A_t here, or it would
    count twice. Where pi = mu and the clips are at least 1, targets are GAE's returns, and with lambda = 1 A_t is GAE's too.

    Args:
        rewards: [T]
        values: [T], V of the state before each token.
        log_ratio: [T], log pi - log mu; clamped to +-20.
        offsets: [N + 1]
        loss_mask: [T]
        gamma: discount a token.
        gae_lambda: lambda of the traces, once a step.
        rho: clip of the ratio in delta; decides which policy's values are learned, mu's as it goes to 0 and pi's where it does not bind.
        c: clip of the ratio in the traces; decides how fast.
        ends: as in `gae`.
    """
    steps = find_steps(offsets, loss_mask, gamma)
    value_M = np.asarray(values, np.float64)[steps.index]
    ratio_M = np.exp(np.clip(np.asarray(log_ratio, np.float64)[steps.index], -MAX_LOG_RATIO, MAX_LOG_RATIO))
    reward_M = rewards[steps.index]
    delta_M = np.minimum(ratio_M, rho) * (reward_M + steps.ahead(value_M, ends) - value_M)
    target_M = value_M + scan(delta_M, steps.discount * gae_lambda * np.minimum(ratio_M, c))
    advantage_M = reward_M + steps.ahead(target_M, ends) - value_M
    return steps.scatter(advantage_M, len(rewards)), steps.scatter(target_M, len(rewards))


def scan_serial(terms: Floats, factors: Floats) -> Floats:
    """[M] x, one step after the other: the definition.

    Args:
        terms: [M]
        factors: [M]; the last one is multiplied by x_M = 0.
    """
    found = np.empty(len(terms))
    x = 0.0
    for t in range(len(terms) - 1, -1, -1):
        x = float(terms[t]) + float(factors[t]) * x
        found[t] = x
    return found


def scan(terms: Floats, factors: Floats, *, chunk: int = CHUNK) -> Floats:
    """[M] x, equal to `scan_serial` but for rounding: all chunks go in step, then the same scan runs over the chunks.

    Within a chunk, x_t = local_t + product_t x_next, where local_t is what x_t would be if nothing came after the chunk, product_t the
    product of its factors from t on and x_next the first x of the chunk behind it. Nothing is divided, so factors of 0 are exact.

    Args:
        terms: [M]
        factors: [M]; the last one is multiplied by x_M = 0.
        chunk: steps in a chunk, at least 2; the result does not depend on it but for rounding.
    """
    size = len(terms)
    if size <= chunk:
        return scan_serial(terms, factors)
    # One row per step within the chunk, so that each pass below runs over neighbours in memory.
    local_LC, product_LC = _rows_of_steps(terms, chunk), _rows_of_steps(factors, chunk)
    for step in range(chunk - 2, -1, -1):
        local_LC[step] += product_LC[step] * local_LC[step + 1]
        product_LC[step] *= product_LC[step + 1]
    first_C = scan(local_LC[0], product_LC[0], chunk=chunk)
    product_LC *= np.append(first_C[1:], 0.0)
    local_LC += product_LC
    return _transpose(local_LC).reshape(-1)[:size]


def _rows_of_steps(values: Floats, chunk: int) -> Floats:
    """[chunk, C] the values [M], a column per chunk; 0 behind the last."""
    padded = np.zeros(-(-len(values) // chunk) * chunk)
    padded[: len(values)] = values
    return _transpose(padded.reshape(-1, chunk))


def _transpose(values: Floats) -> Floats:
    """A copy of the transposed matrix, in C order; in squares, for whole columns a power of two apart drive each other out of the cache."""
    rows, columns = values.shape
    found = np.empty((columns, rows))
    for row in range(0, rows, _SQUARE):
        for column in range(0, columns, _SQUARE):
            found[column : column + _SQUARE, row : row + _SQUARE] = values[row : row + _SQUARE, column : column + _SQUARE].T
    return found
