"""Returns and advantages of tokens: discounted returns, GAE, V-trace. Over packed sequences, in float64 and without torch.

Letters: `T` tokens of a batch, `M` steps. Sample n's tokens are [offsets[n], offsets[n + 1]). A *step* is a token under the mask: only
those are actions, only their rewards and values are read, and only they get a result; the others get 0. Time goes by in tokens: between
a step and the next one that stands d tokens behind it (d > 1 where a tool's answer lies between) the discount is gamma^d. After a
sample's last step nothing follows: V = 0.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.algorithms.log_ratios import MAX_LOG_RATIO
from streamrl.algorithms.scan import scan

Floats = npt.NDArray[np.float64]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a packed batch, in order."""

    index: npt.NDArray[np.int64]
    """[M] token that each step is."""
    discount: Floats
    """[M] what the next step of the sample counts, gamma^d; 0 at its last."""

    def following(self, values: Floats) -> Floats:
        """[M] of each step the value of the next one; what stands at a sample's last step is multiplied by a discount of 0."""
        return np.append(values[1:], 0.0)

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
    discount = np.zeros(len(index))
    if len(index):
        discount[:-1] = np.where(owner[1:] == owner[:-1], gamma ** np.diff(index).astype(np.float64), 0.0)
    return Steps(index=index, discount=discount)


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
    rewards: Floats, values: Floats, offsets: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_], *, gamma: float, gae_lambda: float
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
    """
    steps = find_steps(offsets, loss_mask, gamma)
    value_M = np.asarray(values, np.float64)[steps.index]
    delta_M = rewards[steps.index] + steps.discount * steps.following(value_M) - value_M
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
    """
    steps = find_steps(offsets, loss_mask, gamma)
    value_M = np.asarray(values, np.float64)[steps.index]
    ratio_M = np.exp(np.clip(np.asarray(log_ratio, np.float64)[steps.index], -MAX_LOG_RATIO, MAX_LOG_RATIO))
    reward_M = rewards[steps.index]
    delta_M = np.minimum(ratio_M, rho) * (reward_M + steps.discount * steps.following(value_M) - value_M)
    target_M = value_M + scan(delta_M, steps.discount * gae_lambda * np.minimum(ratio_M, c))
    advantage_M = reward_M + steps.discount * steps.following(target_M) - value_M
    return steps.scatter(advantage_M, len(rewards)), steps.scatter(target_M, len(rewards))
