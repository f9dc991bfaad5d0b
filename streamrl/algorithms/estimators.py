"""From the section `loss` to one advantage per token of a batch. Without torch: both backends and all ranks come to the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.algorithms.advantages import Reduce, distill, grpo, maxrl, raw, rloo, token_kl, token_rewards, whiten
from streamrl.algorithms.baselines import gdpo, gpg, opo, pass_at_k, remax
from streamrl.algorithms.batch_metrics import advantage_spread
from streamrl.algorithms.groups import rollout_mean, rollout_of_sample
from streamrl.algorithms.optimal_baselines import opob, optimal_token_baseline
from streamrl.algorithms.returns import discounted_returns, gae, vtrace
from streamrl.config.loss import LossConfig, estimator_of, is_function
from streamrl.config.plugins import named_failures, resolve
from streamrl.config.registry import POLICY_LOSSES, Role, reading
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.errors import ConfigError, TrainingError

Floats = npt.NDArray[np.float64]


class TokenArrays(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch's tokens were given by the models, [T] unless it is said; None where it was not asked for. Read at `mask` only."""

    mask: npt.NDArray[np.bool_]
    """Trained tokens whose log-probs are all finite."""
    logprobs: Floats | None = None
    """Of the policy before the batch's first step."""
    reference: Floats | None = None
    teacher: Floats | None = None
    values: Floats | None = None
    """Of the state before each token."""
    energy: Floats | None = None
    """How far the policy's gradient at each token reaches (`optimal_baselines.token_energies`)."""
    ends: Floats | None = None
    """[N] values of the states behind the last tokens of truncated samples, 0 for others (`loss.bootstrap_truncated`)."""
    kl: Floats | None = None
    """The estimate `loss.kl.estimator` of KL(policy || reference)."""


class TokenAdvantages(msgspec.Struct, frozen=True, kw_only=True):
    """Advantages of a batch, before any of its optimizer steps."""

    advantages: Floats
    """[T]; 0 outside the loss mask."""
    returns: Floats | None
    """[T] what the critic learns (ppo), or the discounted returns (reinforce_plus_plus); 0 outside the loss mask; None: there are none."""
    finite: npt.NDArray[np.bool_]
    """[T] False at trained tokens with a log-prob that is not finite: they have no advantage and take part in no statistic, and are to be
    dropped from the loss and counted."""
    metrics: dict[str, float]


Custom = Callable[[TrainBatch, TokenArrays], Any]


def needed_scores(loss: LossConfig) -> frozenset[Role]:
    """Whose per-token numbers `token_advantages` must be given: `PROXIMAL` stands for `logprobs`, `VALUE` for `values`."""
    roles = set(estimator_of(loss).needs)
    if loss.kl.reward_coef != 0:
        roles |= {Role.PROXIMAL, Role.REFERENCE}
    if loss.distillation.coef != 0:
        roles |= {Role.PROXIMAL, Role.TEACHER}
    if Role.VALUE in roles and loss.critic.targets == "vtrace":
        roles.add(Role.PROXIMAL)
    return frozenset(roles)


def token_advantages(
    batch: TrainBatch,
    loss: LossConfig,
    *,
    logprobs: npt.NDArray[np.floating] | None = None,
    reference: npt.NDArray[np.floating] | None = None,
    teacher: npt.NDArray[np.floating] | None = None,
    values: npt.NDArray[np.floating] | None = None,
    energy: npt.NDArray[np.floating] | None = None,
    ends: npt.NDArray[np.floating] | None = None,
    reduce: Reduce | None = None,
    base: Path | None = None,
) -> TokenAdvantages:
    """Advantages of all tokens as `loss` says: the estimator, then distillation's term, then whitening.

    `loss.normalize_rewards = false` gives grpo the rewards as they are, and reinforce_plus_plus_baseline the rewards less the KL penalty.
    A function of the user's is called as f(batch, arrays) and returns [T] numbers, read at `arrays.mask`.

    Metrics: those of the rewards (`groups.RolloutRewards.metrics`), and means by `groups.rollout_mean` over trained tokens:
    `rollout/advantages` and `rollout/advantages_abs` (as returned), and where there are such numbers `rollout/returns`, `rollout/values`,
    `rollout/kl` (the estimate before its coefficient) and `train/opd_reverse_kl`. `advantage_spread` gives the others of the advantages.

    Args:
        batch: the whole batch, with rewards.
        loss: the section `loss`.
        logprobs: [T] of the policy before the batch's first step. This and the next three are read at trained tokens only; those that
            `needed_scores` names must be given.
        reference: [T] log-probs of the reference policy.
        teacher: [T] log-probs of the teacher.
        values: [T] the critic's, of the state before each token.
        energy: [T] `optimal_baselines.token_energies`; read at trained tokens only.
        ends: [N] the critic's, of the state behind the last token of samples that go on from there; 0 for the others. None: none does.
        reduce: sums over ranks, where each is given other groups of the batch; the metrics are then of those.
        base: directory that a relative path in `loss.advantage` starts from.

    Raises:
        TrainingError: rewards that cannot be used, an array that is missing or has another shape, a value that is not finite, or whitening
            where no token is trained.
        ConfigError: a combination that would be ignored silently, or a function that is not there, raises, or gives no finite advantages.
    """
    _check(loss)
    arrays = replace(_arrays(batch, loss, logprobs, reference, teacher, values, energy), ends=_ends(batch, ends))
    if is_function(loss.advantage):
        _, metrics = raw(*_rewards(batch))
        found, returns = _custom(batch, loss, arrays, base), None
    else:
        found, returns, metrics = ESTIMATORS[loss.advantage](batch, loss, arrays)
    mask, rollout_T = arrays.mask, rollout_of_sample(batch.tasks, batch.rollouts)[sample_of_token(batch)]
    if loss.distillation.coef != 0:
        assert arrays.logprobs is not None and arrays.teacher is not None  # `_arrays` has looked
        found, reverse_kl = distill(found, arrays.logprobs, arrays.teacher, mask, coef=loss.distillation.coef)
        metrics["train/opd_reverse_kl"] = rollout_mean(reverse_kl, mask, rollout_T)
    if loss.whiten == "on" or estimator_of(loss).whitened:
        found = whiten(found, mask, reduce=reduce)
    named = {"advantages": found, "advantages_abs": np.abs(found), "returns": returns, "values": arrays.values, "kl": arrays.kl}
    metrics |= {f"rollout/{name}": rollout_mean(array, mask, rollout_T) for name, array in named.items() if array is not None}
    metrics |= advantage_spread(found[mask])
    return TokenAdvantages(advantages=found, returns=returns, finite=mask | ~batch.loss_mask, metrics=metrics)


def _check(loss: LossConfig) -> None:
    name, known = loss.advantage, estimator_of(loss)
    if not is_function(name) and name not in ESTIMATORS:
        raise ConfigError(
            f"expected loss.advantage to be {', '.join(ESTIMATORS)} or a function, got {name!r}",
            hint=f"it is a policy loss here: loss.policy = '{name}'" if name in POLICY_LOSSES else "see docs/algorithms.md",
            key="loss.advantage",
        )
    if known.whitened and loss.whiten == "off":
        raise ConfigError(
            f'loss.whiten = "off" with loss.advantage = "{name}": this estimator is defined with whitening',
            hint='leave loss.whiten at "auto"',
            key="loss.whiten",
        )
    if loss.kl.reward_coef != 0 and name in ESTIMATORS and not known.token_rewards:
        raise ConfigError(
            f'loss.kl.reward_coef = {loss.kl.reward_coef} with loss.advantage = "{name}", which rewards rollouts, not tokens',
            hint=f"use loss.kl.loss_coef, or one of {', '.join(reading('kl.reward_coef'))}",
            key="loss.kl.reward_coef",
        )
    if not loss.normalize_rewards and known.grouped and name not in reading("normalize_rewards"):
        raise ConfigError(
            f'loss.normalize_rewards = false with loss.advantage = "{name}", which is nothing but that normalization',
            hint='use loss.advantage = "grpo" for rewards as they are',
            key="loss.normalize_rewards",
        )


def _arrays(
    batch: TrainBatch,
    loss: LossConfig,
    logprobs: npt.NDArray[np.floating] | None,
    reference: npt.NDArray[np.floating] | None,
    teacher: npt.NDArray[np.floating] | None,
    values: npt.NDArray[np.floating] | None,
    energy: npt.NDArray[np.floating] | None,
) -> TokenArrays:
    """The arrays in float64, with the tokens where all are finite."""
    needed = needed_scores(loss)
    given: dict[str, Floats | None] = {}
    for role, name, array in (
        (Role.PROXIMAL, "logprobs", logprobs),
        (Role.REFERENCE, "reference", reference),
        (Role.TEACHER, "teacher", teacher),
        (Role.VALUE, "values", values),
        (Role.ENERGY, "energy", energy),
    ):
        if array is None and role in needed:
            raise TrainingError(
                f'loss.advantage = "{loss.advantage}" expects {name} of every token, got none', hint=f"score the role {role}", scores=name
            )
        if array is not None and array.shape != (batch.num_tokens,):
            raise TrainingError(
                f"expected {name} of {batch.num_tokens} tokens, got an array of shape {array.shape}",
                scores=name,
                expected=(batch.num_tokens,),
                got=array.shape,
            )
        given[name] = None if array is None else array.astype(np.float64)
    mask = batch.loss_mask & np.isfinite(batch.sampler_logprobs)
    for name in ("logprobs", "reference", "teacher", "energy"):
        array = given[name]
        if array is not None:
            mask = mask & np.isfinite(array)
    found = given["values"]
    if found is not None and not np.isfinite(found[mask]).all():
        bad = int(np.flatnonzero(mask & ~np.isfinite(found))[0])
        raise TrainingError(
            f"expected finite values of the critic, got {found[bad]} at token {bad}",
            hint="lower loss.critic.learning_rate",
            scores="values",
            token=bad,
        )
    policy, other = given["logprobs"], given["reference"]
    kl = None
    if policy is not None and other is not None:
        kl = np.zeros(batch.num_tokens)
        kl[mask] = token_kl(policy[mask] - other[mask], loss.kl.estimator)
    return TokenArrays(mask=mask, kl=kl, **given)


def _ends(batch: TrainBatch, ends: npt.NDArray[np.floating] | None) -> Floats | None:
    if ends is None:
        return None
    if ends.shape != (batch.num_samples,) or not np.isfinite(ends).all():
        raise TrainingError(
            f"expected finite values behind {batch.num_samples} samples, got an array of shape {ends.shape}"
            + (f" with {ends[~np.isfinite(ends)][0]}" if not np.isfinite(ends).all() else ""),
            hint="lower loss.critic.learning_rate",
            scores="ends",
        )
    return ends.astype(np.float64)


def _rewards(batch: TrainBatch) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[str, ...]]:
    """What the estimators of groups take."""
    return batch.rewards, batch.tasks, batch.rollouts, batch.agents


def _grpo(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays, *, divided: bool = True) -> Found:
    inputs = _rewards(batch)
    how = {"normalize_std": divided and loss.normalize_std, "batch_std": loss.std == "batch", "leave_one_out": loss.leave_one_out}
    numbers, metrics = grpo(*inputs, **how) if loss.normalize_rewards else raw(*inputs)
    return _spread(batch, arrays, numbers), None, metrics


def _rloo(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = rloo(*_rewards(batch))
    return _spread(batch, arrays, numbers), None, metrics


def _maxrl(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = maxrl(*_rewards(batch))
    return _spread(batch, arrays, numbers), None, metrics


def _opo(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    lengths = np.bincount(sample_of_token(batch)[arrays.mask], minlength=batch.num_samples)
    numbers, metrics = opo(*_rewards(batch), lengths=lengths)
    return _spread(batch, arrays, numbers), None, metrics


def _opob(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    assert arrays.logprobs is not None and arrays.energy is not None  # `_arrays` has looked
    sample_M = sample_of_token(batch)[arrays.mask]
    log_ratio_M = arrays.logprobs[arrays.mask] - batch.sampler_logprobs[arrays.mask]
    log_ratios = np.bincount(sample_M, log_ratio_M, batch.num_samples).astype(np.float64)
    energies = np.bincount(sample_M, arrays.energy[arrays.mask], batch.num_samples).astype(np.float64)
    numbers, metrics = opob(*_rewards(batch), log_ratios=log_ratios, energies=energies, normalize_std=loss.normalize_std)
    return _spread(batch, arrays, numbers), None, metrics


def _optimal_token_baseline(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    assert arrays.energy is not None  # `_arrays` has looked
    found = np.zeros(batch.num_tokens)
    energies, samples = arrays.energy[arrays.mask], sample_of_token(batch)[arrays.mask]
    found[arrays.mask], metrics = optimal_token_baseline(*_rewards(batch), energies=energies, samples=samples)
    return found, None, metrics


def _gpg(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = gpg(*_rewards(batch))
    return _spread(batch, arrays, numbers), None, metrics


def _gdpo(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = gdpo(*_rewards(batch), parts=batch.reward_parts, weights=loss.objectives)
    return _spread(batch, arrays, numbers), None, metrics


def _pass_at_k(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = pass_at_k(*_rewards(batch), k=loss.pass_k)
    return _spread(batch, arrays, numbers), None, metrics


def _remax(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    numbers, metrics = remax(*_rewards(batch), baselines=batch.baselines)
    rewards = token_rewards(numbers, batch.offsets, arrays.mask, kl=arrays.kl, kl_coef=loss.kl.reward_coef)
    # What of a sample's reward is still to come: numbers, less the KL from the token on.
    return np.where(arrays.mask, discounted_returns(rewards, batch.offsets, gamma=1.0), 0.0), None, metrics


def _reinforce_plus_plus(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    rewards, metrics = _token_rewards(batch, loss, arrays)
    found = np.where(arrays.mask, discounted_returns(rewards, batch.offsets, gamma=loss.gamma), 0.0)
    return found, found, metrics


def _reinforce_plus_plus_baseline(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    found, _, metrics = _grpo(batch, loss, arrays, divided=False)
    if loss.kl.reward_coef != 0:
        assert arrays.kl is not None  # `_arrays` has looked
        found[arrays.mask] -= loss.kl.reward_coef * arrays.kl[arrays.mask]
    return found, None, metrics


def _ppo(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> Found:
    rewards, metrics = _token_rewards(batch, loss, arrays)
    mask, ends = arrays.mask, arrays.ends
    options: dict[str, Any] = {"gamma": loss.gamma, "gae_lambda": loss.gae_lambda}
    assert arrays.values is not None  # `_arrays` has looked
    if loss.critic.targets == "gae":
        return *gae(rewards, arrays.values, batch.offsets, mask, ends=ends, **options), metrics
    assert arrays.logprobs is not None
    log_ratio = np.where(mask, arrays.logprobs, 0.0) - np.where(mask, batch.sampler_logprobs, 0.0)
    options |= {"rho": loss.critic.vtrace_rho, "c": loss.critic.vtrace_c}
    return *vtrace(rewards, arrays.values, log_ratio, batch.offsets, mask, ends=ends, **options), metrics


def _spread(batch: TrainBatch, arrays: TokenArrays, numbers: Floats) -> Floats:
    """[T] each sample's number at its trained tokens."""
    return np.where(arrays.mask, numbers[sample_of_token(batch)], 0.0)


def _token_rewards(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays) -> tuple[Floats, dict[str, float]]:
    rewards, metrics = raw(*_rewards(batch))
    return token_rewards(rewards, batch.offsets, arrays.mask, kl=arrays.kl, kl_coef=loss.kl.reward_coef), metrics


Given = TypeVar("Given", TrainBatch, TokenArrays)
Found = tuple[Floats, Floats | None, dict[str, float]]
"""[T] advantages and, where there are any, [T] returns, both 0 outside the mask; and the metrics of the rewards."""

ESTIMATORS: Mapping[str, Callable[[TrainBatch, LossConfig, TokenArrays], Found]] = MappingProxyType(
    {
        "grpo": _grpo,
        "rloo": _rloo,
        "maxrl": _maxrl,
        "opo": _opo,
        "opob": _opob,
        "optimal_token_baseline": _optimal_token_baseline,
        "gpg": _gpg,
        "gdpo": _gdpo,
        "pass_at_k": _pass_at_k,
        "remax": _remax,
        "reinforce_plus_plus": _reinforce_plus_plus,
        "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
        "ppo": _ppo,
    }
)
"""The code of what `streamrl.config.registry.ESTIMATORS` describes."""


def _unwritable(struct: Given) -> Given:
    """The same arrays, which the user's function can read: what it wrote to them would change what is trained."""

    def view(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = values.view()
        found.flags.writeable = False
        return found

    named = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return replace(struct, **{name: view(value) for name, value in named.items() if isinstance(value, np.ndarray)})


def _custom(batch: TrainBatch, loss: LossConfig, arrays: TokenArrays, base: Path | None) -> Floats:
    function: Custom = resolve(loss.advantage, what="advantage function", key="loss.advantage", base=base)
    if not callable(function):
        raise ConfigError(
            f"loss.advantage = {loss.advantage!r} must name a function, got a {type(function).__name__}",
            key="loss.advantage",
            got=type(function).__name__,
        )
    if told := getattr(function, "with_loss", None):  # of a foreign form, and to be told the section
        function = told(loss)
    with named_failures(loss.advantage, "loss.advantage"):
        found = np.asarray(function(_unwritable(batch), _unwritable(arrays)), np.float64)
    wrong = {"key": "loss.advantage", "function": loss.advantage}
    if found.shape != (batch.num_tokens,):
        raise ConfigError(
            f"expected {loss.advantage} to return {batch.num_tokens} advantages, one a token, got shape {found.shape}",
            expected=(batch.num_tokens,),
            got=found.shape,
            **wrong,
        )
    if not np.isfinite(found[arrays.mask]).all():
        bad = int(np.flatnonzero(arrays.mask & ~np.isfinite(found))[0])
        raise ConfigError(f"expected finite advantages of {loss.advantage}, got {found[bad]} at token {bad}", token=bad, **wrong)
    return np.where(arrays.mask, found, 0.0)
