"""Off-policy sequence masking: leave out samples that went wrong and that the policy has since left."""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms.sequences import Sequences, mean


def opsm_keep(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, delta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens to keep: not those with A < 0 in a sequence whose mean of log pi_old - log pi is above delta.

    arXiv 2512.02556. What a policy would no longer say teaches it little by being bad, and its ratios are the wildest. Samples of positive
    advantage are always kept. Tokens that are left out keep their place in the denominators: multiply the loss by the result.

    Args:
        logprobs: log pi, [M] packed or [N, L] padded, float32 or float64.
        old_logprobs: log pi_old, of the same shape.
        advantages: A, of the same shape.
        sequences: whose tokens these are; what stands outside its mask is not read, and is kept.
        delta: in nats a token.

    Returns:
        0 or 1 for each token, without gradient, and the metric `train/opsm_clipfrac` (1 where left out).
    """
    gone = sequences.spread(mean(sequences, (old_logprobs - logprobs).detach())) > delta
    left_out = (sequences.mask & gone & (advantages < 0)).to(logprobs.dtype)
    return 1.0 - left_out, {"train/opsm_clipfrac": left_out}
