"""The loss of demonstrations. Those of sampled tokens are in `streamrl.algorithms.policy_losses`."""

from __future__ import annotations

from torch import Tensor


def sft(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: L = -log pi.

    Args:
        logprobs: log pi of the tokens, [M] packed or [N, L] padded, float32 or float64; carries the gradient.

    Returns:
        Loss of each token, of the same shape, and no metrics. Reduction is `streamrl.algorithms.reductions`'.
    """
    return -logprobs, {}
