"""What the tokens of one micro-batch add to the loss, and to the metrics. Letters: `T` tokens of the batch, `M` of the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.choices import Decision
from streamrl.algorithms.corrections import correct, drop_nonfinite, log_linear_proximal
from streamrl.algorithms.importance import normalization
from streamrl.algorithms.kl import kl_loss
from streamrl.algorithms.objective import SOME, Gradient, Objective
from streamrl.algorithms.policy import PolicyTokens
from streamrl.algorithms.policy_losses import sft
from streamrl.algorithms.sequences import Selected, packed_sequences
from streamrl.config.loss import CorrectionConfig
from streamrl.config.plugins import named_failures, resolve
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import Indices
from streamrl.errors import ConfigError
from streamrl.tensors.transfer import on_device

DROPPED = "train/nonfinite_tokens"
PASSED = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of the device that a user's function may be in when they are raised."""
_POLICY = "loss.policy"


class Sums(NamedTuple):
    """Of metrics over the tokens of one micro-batch, where they were computed: whoever reads them waits for them."""

    names: tuple[str, ...]
    values: Tensor
    """Float64, one for each name."""

    def read(self) -> dict[str, float]:
        """By name."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


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

    def learn(self, weights: npt.NDArray[np.float64]) -> Sums:
        """Add the loss's gradient, where it has one; returns the metrics' sums. Both with the reduction's weights [M]."""
        by = on_device(weights, self.loss.device)
        if self.loss.requires_grad:
            (self.loss * by.to(self.loss.dtype)).sum().backward()
        sums = torch.stack([values.double() for values in self.metrics.values()]) @ by
        count = self.dropped.sum().double()
        return Sums((*self.metrics, DROPPED), torch.cat([sums, count[None]]))


class Told(NamedTuple):
    """Of one micro-batch, where it was computed. It is read after the last one: the host lays out the next while the device works."""

    sums: Sums
    target: Indices
    """[m] of the batch's tokens."""
    logprobs: Tensor | None = None
    """[m] of the policy."""
    weights: Tensor | None = None
    """[m] of the policy loss."""


class Updated(NamedTuple):
    """What the optimizer steps of a batch did; equal on all ranks."""

    metrics: dict[str, float]
    """Means over the optimizer steps, weighted as the loss is."""
    finite: bool
    """False when a gradient was not finite and its update was skipped."""
    logprobs: npt.NDArray[np.float64]
    """[T] log-probs of the trained tokens as their optimizer step had them."""
    weights: npt.NDArray[np.float64]
    """[T] what the policy loss of the trained tokens was multiplied by."""
    factor: float
    """What normalisation multiplied these weights by."""
    gradient: Gradient = SOME
    """See `StepResult`."""
    fault: str = ""
    """See `StepResult`."""


def demonstration_terms(logprobs: Tensor, entropy: Tensor) -> Terms:
    """Negative log-likelihood, for demonstrations."""
    loss, _ = sft(logprobs)
    named = {"train/loss": loss.detach(), "train/entropy_loss": entropy.detach()}
    return Terms(loss, named, torch.ones_like(loss), torch.zeros_like(loss, dtype=torch.bool))


def policy_tokens(
    batch: TrainBatch,
    objective: Objective,
    target: Indices,
    logprobs: Tensor,
    entropy: Tensor,
    loss: LossConfig,
    *,
    proximal: npt.NDArray[np.floating] | None,
    progress: float,
    decision: Decision | None = None,
    apart: Tensor | None = None,
) -> tuple[PolicyTokens, Tensor]:
    """What a policy loss is given, and which tokens are dropped [M]: those with a number that is not finite stand outside the mask, as 0.

    Args:
        batch: the whole batch.
        objective: of that batch.
        target: [M] indices in the batch.
        logprobs: [M] of the policy under training, with gradient.
        entropy: [M] of that policy; with gradient where `loss.entropy_coef` is set.
        loss: the section.
        proximal: [T] log-probs before the batch's first step, for `loss.proximal = "recomputed"`; None: those of `logprobs`.
        progress: how much of the batch's optimizer steps is done, in [0, 1).
        decision: what was decided over the whole step.
        apart: [M] how far the policy has gone from the sampler, where the loss goes by their likeliest tokens.
    """

    def like(values: npt.NDArray[np.floating]) -> Tensor:
        return on_device(values[target], logprobs.device, logprobs.dtype)

    scores, current = objective.scores, logprobs.detach()
    staleness = on_device(batch.staleness[target], logprobs.device)
    sampler = like(batch.sampler_logprobs)
    if loss.correction.ratio == "current":
        anchor = current
    elif loss.proximal == "sampler":
        anchor = sampler
    elif loss.proximal == "log_linear":
        anchor = log_linear_proximal(current, sampler, staleness, progress=progress)
    else:
        anchor = current if proximal is None else like(proximal)
    reference = () if scores.reference is None or loss.kl.loss_coef == 0 else (like(scores.reference),)
    packed = packed_sequences(batch, target, place=lambda numbers: on_device(numbers, logprobs.device))
    known = on_device(objective.finite[target], logprobs.device)
    finite = drop_nonfinite(packed.mask & known, logprobs, sampler, anchor, entropy, like(objective.advantages), *reference)
    logprobs, sampler, anchor, entropy, advantages, *others = finite.values
    tokens = PolicyTokens(
        logprobs=logprobs,
        proximal=anchor,
        sampler=sampler,
        advantages=advantages,
        staleness=staleness,
        sequences=Selected(packed, finite.keep),
        entropy=entropy,
        reference=others[0] if others else None,
        chosen=None if decision is None or decision.chosen is None else on_device(decision.chosen[target], logprobs.device),
        apart=apart,
        share=None if decision is None or decision.share is None else like(decision.share),
    )
    return tokens, packed.mask & ~finite.keep


def policy_terms(
    surrogate: Tensor, measured: dict[str, Tensor], tokens: PolicyTokens, dropped: Tensor, config: LossConfig, factor: float
) -> Terms:
    """The policy loss [M] times the correction, plus KL, less entropy; those two stay at rejected tokens.

    Args:
        surrogate: the policy loss.
        measured: its metrics.
        tokens: what it was given.
        dropped: [M] see `policy_tokens`.
        config: the section `loss`.
        factor: of the correction's weights, see `Updated`.
    """
    keep, entropy, kl = tokens.sequences.mask, tokens.entropy, config.kl
    correction = correct(tokens.proximal, tokens.sampler, tokens.staleness, tokens.sequences, config.correction).scaled(factor)
    loss = surrogate.masked_fill(~keep, 0.0) * correction.weights
    if tokens.share is not None:
        loss = loss * tokens.share
    # pi_proximal may be the sampler itself, or drawn towards it: then only the policy's own log-probs are the trainer's.
    own = tokens.proximal if config.proximal == "recomputed" else tokens.logprobs.detach()
    distance = (own - tokens.sampler).abs().masked_fill(~keep, 0.0)
    named = {"train/pg_loss": loss.detach(), **measured, "train/train_rollout_logprob_abs_diff": distance, **correction.metrics}
    if tokens.reference is not None:
        divergence, found = kl_loss(tokens.logprobs, tokens.reference, tokens.proximal, estimator=kl.estimator, unbiased=kl.unbiased)
        loss = loss + kl.loss_coef * divergence.masked_fill(~keep, 0.0)
        named |= found
    assert entropy is not None  # `policy_tokens` gives it
    if config.entropy_coef != 0:
        loss = loss - config.entropy_coef * entropy
    return Terms(loss, {"train/loss": loss.detach(), **named, "train/entropy_loss": entropy.detach()}, correction.weights, dropped)


class UserLoss:
    """Calls the function that `loss.policy` names, and counts what it gives: a `PolicyLoss` that checks another.

    The function cannot leave autograd off behind it.

    Args:
        reference: the function.

    Raises:
        ConfigError: there is none. So do calls whose results are of no use, with the function's name.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        found: Any = resolve(reference, what="policy loss", key=_POLICY)
        if not callable(found):
            raise ConfigError(
                f"loss.policy = {reference!r} must name a function, got a {type(found).__name__}", key=_POLICY, got=_type(found)
            )
        self._function = found
        self._counts: list[Tensor] = []

    def __call__(self, tokens: PolicyTokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
        learns = torch.is_grad_enabled()
        inputs = {name: value for name, value in tokens._asdict().items() if isinstance(value, Tensor)}
        versions = {name: value._version for name, value in inputs.items()}
        with named_failures(self.reference, _POLICY, passed=PASSED), torch.set_grad_enabled(learns):
            given = self._function(tokens, config)
        if written := next((name for name, value in inputs.items() if value._version != versions[name]), ""):
            raise self._wrong("a loss without writing to what it is given", f"another tokens.{written}")
        shape = tokens.logprobs.shape
        if not (isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise self._wrong("a loss and a table of metrics", _type(given))
        loss, metrics = cast("tuple[Any, Mapping[str, Any]]", given)
        for name, value in {"the loss": loss, **metrics}.items():
            if not isinstance(value, Tensor) or value.shape != shape:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else _type(value)
                raise self._wrong(f"tensors of shape {tuple(shape)}", f"{got} for {name}")
        if learns:
            self._count(loss, tokens)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def take(self) -> Tensor:
        """[2] float64, of the calls since this was asked last: tokens with a loss, and tokens whose gradient is not finite."""
        found = torch.stack(self._counts).sum(0).cpu() if self._counts else torch.zeros(2, dtype=torch.float64)
        self._counts = []
        return found

    def _count(self, loss: Tensor, tokens: PolicyTokens) -> None:
        inputs = [one for one in (tokens.logprobs, tokens.entropy) if one is not None and one.requires_grad]
        slopes: Sequence[Tensor | None] = ()
        if loss.requires_grad:
            slopes = cast("Sequence[Tensor | None]", torch.autograd.grad(loss.sum(), inputs, retain_graph=True, allow_unused=True))
        found = [slope for slope in slopes if slope is not None]
        if not found:
            raise self._wrong("a loss with a gradient, made of tokens.logprobs", "one that does not depend on them")
        mask = tokens.sequences.mask
        broken = torch.stack([~torch.isfinite(slope) for slope in found]).any(0) & mask
        spoken = (loss.detach() != 0) & mask
        self._counts.append(torch.stack([spoken.sum(), broken.sum()]).double())

    def _wrong(self, expected: str, got: str) -> ConfigError:
        return ConfigError(
            f"expected {self.reference} to return {expected}, got {got}",
            hint="see docs/algorithms.md for what a policy loss returns; it would return the same again",
            key=_POLICY,
            function=self.reference,
            got=got,
        )


def _type(value: object) -> str:
    return type(value).__name__


def weight_factor(batch: TrainBatch, objective: Objective, correction: CorrectionConfig) -> float:
    """What the correction's weights are multiplied by in all of a batch's steps: makes their mean 1 where that is asked for."""
    proximal = objective.scores.proximal
    if batch.kind == "sft" or not correction.normalize or proximal is None:
        return 1.0
    target = np.flatnonzero(batch.loss_mask & objective.finite)
    mu = torch.from_numpy(batch.sampler_logprobs[target])
    ages = torch.from_numpy(batch.staleness[target])
    sequences = packed_sequences(batch, target)
    return normalization(correct(torch.from_numpy(proximal[target]).to(mu.dtype), mu, ages, sequences, correction).sums)
