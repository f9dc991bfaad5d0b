"""What one token adds to the loss of an optimizer step: policy loss times correction, KL to the reference, entropy.

Letters: `T` tokens of the batch, `M` of a micro-batch. A sample lies whole in one micro-batch, so sums over its tokens are complete.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.corrections import correct, drop_nonfinite, log_linear_proximal
from streamrl.algorithms.importance import normalization
from streamrl.algorithms.kl import kl_loss
from streamrl.algorithms.objective import Objective
from streamrl.algorithms.policy import PolicyLoss, PolicyTokens, policy_loss
from streamrl.algorithms.policy_losses import sft
from streamrl.algorithms.sequences import Packed, Selected
from streamrl.config.loss import is_function
from streamrl.config.plugins import resolve
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch, samples_at
from streamrl.core.packing import Indices
from streamrl.errors import ConfigError, TrainingError


class Terms(NamedTuple):
    """Of the tokens of one micro-batch, all [M]."""

    loss: Tensor
    """With gradient; exactly 0 at tokens that are dropped."""
    metrics: dict[str, Tensor]
    """To be summed with the weights of the reduction, as the loss is."""
    weights: Tensor
    """What the policy loss was multiplied by: 1 without a correction, 0 where rejected."""
    dropped: Tensor
    """Bool: left out because a log-prob or the advantage is not finite."""


def demonstration_terms(logprobs: Tensor, entropy: Tensor) -> Terms:
    """Negative log-likelihood, for demonstrations."""
    loss, metrics = sft(logprobs)
    named = {"train/loss": loss.detach(), **metrics, "train/entropy_loss": entropy.detach()}
    return Terms(loss, named, torch.ones_like(loss), torch.zeros_like(loss, dtype=torch.bool))


class PolicyStep:
    """The loss that the configuration asks for.

    Args:
        loss: the section `loss`; a function that it names as the policy loss gets `PolicyTokens` and the section, and returns the loss of
            each token with per-token metrics.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, loss: LossConfig) -> None:
        self._loss = loss
        self._policy = _user_loss(loss.policy) if is_function(loss.policy) else policy_loss

    def factor(self, batch: TrainBatch, objective: Objective) -> float:
        """What the correction's weights are multiplied by in all of a batch's steps: makes their mean 1 where that is asked for."""
        proximal = objective.scores.proximal
        if not self._loss.correction.normalize or proximal is None:
            return 1.0
        target = np.flatnonzero(batch.loss_mask & objective.finite)
        mu = torch.from_numpy(batch.sampler_logprobs[target])
        ages = torch.from_numpy(batch.staleness[target])
        found = correct(torch.from_numpy(proximal[target]).to(mu.dtype), mu, ages, sequences_of(batch, target), self._loss.correction)
        return normalization(found.sums)

    def terms(
        self,
        batch: TrainBatch,
        objective: Objective,
        target: Indices,
        logprobs: Tensor,
        entropy: Tensor,
        *,
        progress: float,
        factor: float,
    ) -> Terms:
        """Loss and metrics of the tokens `target`. The correction is of the policy loss alone: KL and entropy stay at rejected tokens.

        Args:
            batch: the whole batch.
            objective: of that batch.
            target: [M] indices in the batch.
            logprobs: [M] of the policy under training, with gradient.
            entropy: [M] of that policy; with gradient where `loss.entropy_coef` is set.
            progress: how much of the batch's optimizer steps is done, in [0, 1).
            factor: see `factor`.
        """
        config, scores = self._loss, objective.scores
        staleness = torch.from_numpy(batch.staleness[target]).to(logprobs.device)
        sampler = _like(logprobs, batch.sampler_logprobs[target])
        reference = None if scores.reference is None or config.kl.loss_coef == 0 else _like(logprobs, scores.reference[target])
        proximal = self._proximal(logprobs, sampler, staleness, scores.proximal, target, progress)
        packed = sequences_of(batch, target, device=logprobs.device)
        known = torch.from_numpy(objective.finite[target]).to(logprobs.device)
        others = () if reference is None else (reference,)
        advantages = _like(logprobs, objective.advantages[target])
        finite = drop_nonfinite(packed.mask & known, logprobs, sampler, proximal, entropy, advantages, *others)
        logprobs, sampler, proximal, entropy, advantages, *others = finite.values
        tokens = PolicyTokens(
            logprobs=logprobs,
            proximal=proximal,
            sampler=sampler,
            advantages=advantages,
            entropy=entropy,
            reference=others[0] if others else None,
            staleness=staleness,
            sequences=Selected(packed, finite.keep),
        )
        surrogate, metrics = self._policy(tokens, config)
        correction = correct(proximal, sampler, staleness, tokens.sequences, config.correction).scaled(factor)
        loss = surrogate.masked_fill(~finite.keep, 0.0) * correction.weights
        named = {"train/pg_loss": loss.detach(), **metrics, **correction.metrics}
        if tokens.reference is not None:
            kl = config.kl
            distance, found = kl_loss(logprobs, tokens.reference, proximal, estimator=kl.estimator, unbiased=kl.unbiased)
            loss = loss + kl.loss_coef * distance.masked_fill(~finite.keep, 0.0)
            named |= found
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * entropy
        named = {"train/loss": loss.detach(), **named, "train/entropy_loss": entropy.detach()}
        return Terms(loss, named, correction.weights, packed.mask & ~finite.keep)

    def _proximal(
        self,
        logprobs: Tensor,
        sampler: Tensor,
        staleness: Tensor,
        recomputed: npt.NDArray[np.floating] | None,
        target: Indices,
        progress: float,
    ) -> Tensor:
        """Log-probs [M] of the policy that ratios are taken against, without gradient."""
        current = logprobs.detach()
        if self._loss.correction.ratio == "current":
            return current
        if self._loss.proximal == "sampler":
            return sampler
        if self._loss.proximal == "log_linear":
            return log_linear_proximal(current, sampler, staleness, progress=progress)
        # At the first step the policy is pi_proximal itself; scored in another layout it would differ by rounding.
        return current if recomputed is None or progress == 0 else _like(logprobs, recomputed[target])


def sequences_of(batch: TrainBatch, target: Indices, *, device: torch.device | None = None) -> Packed:
    """Which of the tokens `target` [M] belong to one sample; samples without any are left out."""
    samples, number = np.unique(samples_at(batch, target), return_inverse=True)
    return Packed(torch.from_numpy(number.reshape(-1)).to(device or torch.device("cpu")), len(samples))


def _user_loss(reference: str) -> PolicyLoss:
    found: Any = resolve(reference, what="policy loss", key="loss.policy")
    function: PolicyLoss = found
    if not callable(found):
        raise ConfigError(f"loss.policy = {reference!r} must name a function, got a {type(found).__name__}", key="loss.policy")

    def checked(tokens: PolicyTokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = function(tokens, config)
        if loss.shape != tokens.logprobs.shape or any(value.shape != loss.shape for value in metrics.values()):
            shapes = [tuple(value.shape) for value in (loss, *metrics.values())]
            raise TrainingError(f"expected {reference} to return a loss and metrics of shape {tuple(tokens.logprobs.shape)}, got {shapes}")
        return loss, metrics

    return checked


def _like(reference: Tensor, values: npt.NDArray[np.floating]) -> Tensor:
    return torch.as_tensor(values, dtype=reference.dtype, device=reference.device)
