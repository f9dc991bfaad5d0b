"""A second implementation, from the papers' equations: sums over the future, one sequence and one step at a time.

A sequence is a list of (position, reward, value, ratio), its steps in order; a discount is gamma to the power of the positions between.
"""

from math import prod

Step = tuple[int, float, float, float]


def delta(steps: list[Step], t: int, gamma: float) -> float:
    """r_t + gamma V(x_{t+1}) - V(x_t), where V is 0 after the last step."""
    position, reward, value, _ = steps[t]
    if t + 1 == len(steps):
        return reward - value
    return reward + gamma ** (steps[t + 1][0] - position) * steps[t + 1][2] - value


def gae(steps: list[Step], gamma: float, lam: float) -> list[float]:
    """arXiv 1506.02438, equation 16: the sum over l of (gamma lambda)^l delta_{t+l}."""
    return [
        sum(gamma ** (steps[k][0] - steps[t][0]) * lam ** (k - t) * delta(steps, k, gamma) for k in range(t, len(steps)))
        for t in range(len(steps))
    ]


def vtrace(steps: list[Step], gamma: float, lam: float, rho: float, c: float) -> tuple[list[float], list[float]]:
    """arXiv 1802.01561, equation 1 with remark 2's lambda, and q_s - V(x_s) of its section 4.2: (advantages, targets)."""
    targets = [
        steps[s][2]
        + sum(
            gamma ** (steps[t][0] - steps[s][0])
            * prod(lam * min(c, steps[i][3]) for i in range(s, t))
            * min(rho, steps[t][3])
            * delta(steps, t, gamma)
            for t in range(s, len(steps))
        )
        for s in range(len(steps))
    ]
    advantages = [
        reward + (gamma ** (steps[s + 1][0] - position) * targets[s + 1] if s + 1 < len(steps) else 0.0) - value
        for s, (position, reward, value, _) in enumerate(steps)
    ]
    return advantages, targets
