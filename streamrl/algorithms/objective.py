"""What one optimizer step minimises, as arrays over the batch's tokens: shared by all backends, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.algorithms.batch_metrics import length_metrics
from streamrl.algorithms.estimators import needed_scores, token_advantages
from streamrl.algorithms.groups import rollout_rewards
from streamrl.algorithms.reductions import token_weights
from streamrl.config.loss import is_function
from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.core.packing import Indices, split_groups
from streamrl.errors import TrainingError
from streamrl.telemetry.names import MOST_ENGINES, of_engine

Array = npt.NDArray[np.floating]
Gradient = Literal["some", "zero", "none"]
"""The gradient that a batch gave the policy: `zero` where it has none and that may be right, as all tokens are clipped or rejected or all
advantages are 0; `none` where that is not why; else `some`, also where the policy is not to learn."""
SOME: Gradient = "some"

DISTANCE = "train/same_weights_logprob_abs_diff"
DISTANCE_P99 = "train/same_weights_logprob_abs_diff_p99"
DISTANCE_MAX = "train/same_weights_logprob_abs_diff_max"
LOGPROB_AT_MAX = "train/same_weights_furthest_logprob"
"""Metrics of the distance between trainer and sampler where both had the same weights; the last is the sampler's log-prob of the token with
the greatest."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What models say about the trained tokens before the batch's first optimizer step, [T] unless it is said; None where nobody asked."""

    proximal: Array | None = None
    """Log-probs under the policy."""
    reference: Array | None = None
    teacher: Array | None = None
    values: Array | None = None
    """The critic's, of the state before each token."""
    energy: Array | None = None
    """See `optimal_baselines.token_energies`."""
    ends: Array | None = None
    """[N] the critic's, of the state behind the last token of samples that a length limit truncated; 0 for the others."""


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, ready for its optimizer steps."""

    steps: tuple[Indices, ...]
    """Samples of each optimizer step."""
    weights: tuple[npt.NDArray[np.float64], ...]
    """[T] for each step: how much a token's loss counts. Fixed before anything is dropped or rejected."""
    advantages: npt.NDArray[np.float64]
    """[T]; 0 for demonstrations."""
    returns: npt.NDArray[np.float64] | None
    """[T] what the critic learns, where there is one."""
    finite: npt.NDArray[np.bool_]
    """[T] False at trained tokens that are dropped and counted, for some log-prob of theirs is not finite."""
    scores: Scores
    metrics: dict[str, float]
    """What is known before the model has been trained."""


def check_batch(batch: TrainBatch) -> None:
    """Raise TrainingError when the batch is empty, or trains a sequence's first token."""
    if batch.num_samples == 0 or not (batch.lengths > 0).all():
        raise TrainingError(
            f"expected a batch of samples with tokens, got {batch.num_samples} samples of lengths {batch.lengths.tolist()[:8]}",
            num_samples=batch.num_samples,
        )
    if batch.loss_mask[batch.offsets[:-1]].any():
        raise TrainingError(
            "expected no trained token at the beginning of a sequence: nothing predicts it",
            hint="keep the prompt's tokens masked",
            field="loss_mask",
        )


def make_objective(batch: TrainBatch, loss: LossConfig, minibatches: int, scores: Scores | None = None) -> Objective:
    """Advantages over the whole batch, then `minibatches` steps of whole groups with weights of their own.

    Raises:
        TrainingError: the batch is empty, trains a sequence's first token, or its rewards cannot be used.
    """
    check_batch(batch)
    scores = scores or Scores()
    steps = split_groups(batch, minibatches)
    sizes = {"constant_length": loss.constant_length, "legacy_samples": loss.legacy_samples}
    weights = tuple(token_weights(batch, samples, loss.reduction, **sizes) for samples in steps)
    metrics = length_metrics(batch)
    if batch.kind == "sft":
        nothing, every = np.zeros(batch.num_tokens), np.ones(batch.num_tokens, np.bool_)
        return Objective(
            steps=tuple(steps), weights=weights, advantages=nothing, returns=None, finite=every, scores=scores, metrics=metrics
        )
    for name, added in (("rollout/overlong_penalty", batch.penalties), ("rollout/length_reward", batch.length_rewards)):
        if added is not None:
            metrics[name] = float(rollout_rewards(added, batch.tasks, batch.rollouts, batch.agents).rewards.mean())
    found = token_advantages(
        batch,
        loss,
        logprobs=scores.proximal,
        reference=scores.reference,
        teacher=scores.teacher,
        values=scores.values,
        energy=scores.energy,
        ends=scores.ends,
    )
    return Objective(
        steps=tuple(steps),
        weights=weights,
        advantages=found.advantages,
        returns=found.returns,
        finite=found.finite,
        scores=scores,
        metrics={**metrics, **found.metrics},
    )


def judge_gradient(
    batch: TrainBatch, objective: Objective, loss: LossConfig, norms: Sequence[float], *, spoken: bool = True
) -> tuple[Gradient, str]:
    """Tell what the optimizer steps of a batch got, and why they got none.

    Args:
        batch: of sampled tokens, that the policy learns from.
        objective: of that batch.
        loss: the section.
        norms: of the gradients of all steps, which are finite.
        spoken: the user's loss, where it is one, was not 0 everywhere: what is clipped has a loss and no gradient.
    """
    trained_T = objective.finite & (np.sum(objective.weights, 0) > 0)
    if any(norms) or not trained_T.any():
        return SOME, ""
    if not (objective.advantages[trained_T] != 0).any():
        rewards = batch.rewards[np.unique(sample_of_token(batch)[trained_T])]
        if is_function(loss.advantage) and len(np.unique(rewards[np.isfinite(rewards)])) > 1:
            return "none", f"{loss.advantage} has given advantages of 0 everywhere"
        return "zero", "all its advantages are 0, as where the rewards of each group are equal"
    named = loss.of_logits or (loss.policy if is_function(loss.policy) else "")
    if named and not spoken:
        return "none", f"{named} has given a loss of 0 everywhere"
    return "zero", "the loss of every token is clipped or rejected"


def needed_roles(batch: TrainBatch, loss: LossConfig, steps: int) -> frozenset[Role]:
    """Whose scores a batch needs before the first of its `steps` optimizer steps. With one step the policy itself is pi_proximal."""
    if batch.kind == "sft":
        return frozenset()
    roles = set(needed_scores(loss))
    recomputed = loss.proximal == "recomputed" and loss.correction.ratio == "proximal"
    if (steps > 1 and recomputed) or loss.correction.normalize or loss.of_logits or is_function(loss.advantage):
        roles.add(Role.PROXIMAL)
    if loss.kl.loss_coef > 0:
        roles.add(Role.REFERENCE)
    return frozenset(roles)


def answer_probability(batch: TrainBatch, logprobs: npt.NDArray[np.float64]) -> float:
    """Mean over the samples with trained tokens of the probability of all of them: exp(sum of log-probs).

    Args:
        batch: the batch.
        logprobs: [T]; only those of trained tokens are read.
    """
    total_N = np.add.reduceat(np.where(batch.loss_mask, logprobs, 0.0), batch.offsets[:-1])
    trained_N = np.add.reduceat(batch.loss_mask.astype(np.int64), batch.offsets[:-1]) > 0
    return float(np.exp(total_N[trained_N]).mean()) if trained_N.any() else 0.0


def logprob_differences(batch: TrainBatch, logprobs: npt.NDArray[np.floating]) -> dict[str, float]:
    """How far trainer and sampler are apart on the trained tokens: the greatest distance, and what `distances` says of the same weights.

    Those are of samples that the very version that is trained from has sampled, from the first token to the last: what is left is what two
    implementations and their rounding leave. In other samples the policy has moved since, and a token of age 0 behind older ones was
    sampled from keys and values of older weights. Without such samples there are no numbers for them.

    Args:
        batch: of sampled tokens.
        logprobs: [T] the trainer's before the batch's first update; only those of trained tokens are read, where they are finite.
    """
    mask_T = batch.loss_mask & np.isfinite(logprobs) & np.isfinite(batch.sampler_logprobs)
    distance_T = np.abs(np.where(mask_T, logprobs, 0.0) - np.where(mask_T, batch.sampler_logprobs, 0.0))
    found: dict[str, float] = {}
    if mask_T.any():
        found["train/train_rollout_logprob_abs_diff_max"] = float(distance_T[mask_T].max())
    fresh_N = np.maximum.reduceat(batch.staleness, batch.offsets[:-1]) == 0
    fresh_T = mask_T & fresh_N[sample_of_token(batch)]
    if fresh_T.any():
        found |= distances(batch, distance_T, fresh_T)
    return found


def distances(batch: TrainBatch, distance_T: npt.NDArray[np.floating], same_T: npt.NDArray[np.bool_]) -> dict[str, float]:
    """What is said of the distances [T] between trainer and sampler on tokens that the same weights sampled, of which there are some.

    The mean is also said for each worker that runs an engine: one of many may be wrong.
    """
    distance_M = distance_T[same_T]
    found = {
        DISTANCE: float(distance_M.mean()),
        DISTANCE_P99: float(np.percentile(distance_M, 99)),
        DISTANCE_MAX: float(distance_M.max()),
        LOGPROB_AT_MAX: float(batch.sampler_logprobs[same_T][distance_M.argmax()]),
    }
    if batch.engines:
        names = np.array([of_engine(DISTANCE, engine) for engine in batch.engines])[sample_of_token(batch)[same_T]]
        found |= {name: float(distance_M[names == name].mean()) for name in np.unique(names).tolist()[:MOST_ENGINES]}
    return found
