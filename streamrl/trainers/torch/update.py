"""From a batch to new parameters: score -> objective -> micro-batches -> terms -> backward -> optimizer step, of policy and critic.

Letters: `T` tokens of the batch, `M` of a micro-batch. A sample lies whole in one micro-batch, so sums over its tokens are complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from streamrl.algorithms.batch_metrics import step_means
from streamrl.algorithms.choices import Decision, decide, decides
from streamrl.algorithms.kl_coefficient import adapted, coefficient, decayed, measured_kl, with_factor
from streamrl.algorithms.objective import SOME, Gradient, Objective, Scores, judge_gradient, make_objective, needed_roles
from streamrl.algorithms.optimal_baselines import token_energies
from streamrl.algorithms.policy import policy_loss
from streamrl.algorithms.step_size import rollout_ess, scaled_rate
from streamrl.config.bridges import bridges, function_of
from streamrl.config.loss import is_function, likeliest_of
from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig, TrainerConfig
from streamrl.core.batches import TrainBatch, uncut
from streamrl.core.candidates import candidate_metrics
from streamrl.core.packing import ROW, Indices, MicroBatch, packed_row_length
from streamrl.core.truncated import truncated_samples, with_ends
from streamrl.errors import ConfigError, TrainingError
from streamrl.tensors.transfer import on_device
from streamrl.trainers.torch.balancing import Balancing
from streamrl.trainers.torch.critic import Critic
from streamrl.trainers.torch.direction import Direction
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.layout import Layout, micro_batches
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.reproducible import reproducible
from streamrl.trainers.torch.terms import (
    DROPPED,
    Sums,
    Told,
    Updated,
    UserLoss,
    demonstration_terms,
    policy_terms,
    policy_tokens,
    weight_factor,
)

Bools = npt.NDArray[np.bool_]
_SCORING = {Role.PROXIMAL: "perf/log_probs_time", Role.REFERENCE: "perf/ref_log_probs_time"}
"""Metrics of the time that scoring takes."""


class WholeLoss(Protocol):
    """A loss of the logits of whole samples, in place of the policy loss."""

    reference: str
    """The function, as the configuration names it."""

    def wanted(self, batch: TrainBatch, trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[T] the tokens whose logits it wants, of those that are `trained`."""
        ...

    def learn(
        self, policy: LanguageModel, batch: TrainBatch, objective: Objective, index: int, micro: MicroBatch
    ) -> tuple[dict[str, float], npt.NDArray[np.float64], Indices]:
        """One micro-batch of optimizer step `index`: the metrics' sums, and log-probs of its trained tokens with their indices."""
        ...

    def take(self) -> Tensor:
        """[2] of the calls since this was asked last: losses that are not 0, and gradients that are not finite."""
        ...


def _whole_loss(loss: LossConfig) -> WholeLoss | None:
    made = (function_of(one.loss)(loss) for one in bridges() if one.loss and loss.of_logits)
    return next(made, None)


class Update:
    """Knows the models, the loss and the optimizers. Every rank has its share of the samples, and all come to the same numbers.

    Args:
        loss: the objective; a function that it names as the policy loss gets `PolicyTokens` and the section, and returns the loss of each
            token with per-token metrics.
        trainer: how a batch is cut into optimizer steps and micro-batches.
        policy: the model under training.
        optimizer: the policy's.
        frozen: reference and teacher, as far as `loss` asks for them.
        critic: where the advantages need one.
        parallel: sums over ranks.
        deterministic: refuse kernels that are not reproducible.
        settle: called before parameters and moments are written.

    Raises:
        ConfigError: a function that `loss` names is not there, or something is asked of the routers of a dense model.
    """

    def __init__(
        self,
        loss: LossConfig,
        trainer: TrainerConfig,
        *,
        policy: LanguageModel,
        optimizer: ClippedAdamW,
        frozen: Mapping[Role, LanguageModel],
        critic: Critic | None,
        parallel: Parallel,
        deterministic: bool,
        settle: Callable[[], None],
    ) -> None:
        self._loss = loss
        self._now = loss
        """With the KL's coefficient of the batch that was prepared last."""
        self.kl_factor = 1.0
        """Of that coefficient, where it is adapted: the next batch's."""
        self._minibatches = trainer.minibatches
        self._config = trainer.optimizer
        self._replays = trainer.support_replay
        self.budget = trainer.micro_tokens
        """Tokens of one forward and backward pass."""
        self.least_row = ROW
        """Positions of a packed row where no sample is longer, as far as the budget reaches."""
        self.wrote = False
        """Whether an optimizer has begun to write in the batch that was prepared last: then its step cannot be repeated."""
        self.times: dict[str, float] = {}
        """Seconds by metric, of the batch that was prepared last."""
        self._policy = policy
        self._optimizer = optimizer
        self._frozen = frozen
        self._critic = critic
        self._trained = [policy, *([critic.body] if critic is not None else [])]
        self._parallel = parallel
        self._deterministic = deterministic
        self._settle = settle
        self._direction = Direction(parallel) if trainer.gradient_cosine else None
        self._balancing = Balancing(policy, loss.experts, parallel)
        if trainer.routing_replay and not len(policy.routers):
            raise ConfigError(
                f"trainer.routing_replay is for a mixture of experts, but model.path holds {policy.name}, which has no known routers",
                hint="leave it out",
                key="trainer.routing_replay",
            )
        policy.routers.replays = trainer.routing_replay
        mine = UserLoss(loss.policy) if is_function(loss.policy) else None
        self._policy_loss = mine or policy_loss
        self._whole = _whole_loss(loss)
        self._users = self._whole or mine

    def prepare(self, batch: TrainBatch) -> Objective:
        """Score what the loss needs of each model at the trained tokens, and make the batch's objective of it; raises TrainingError."""
        self.wrote, self.times = False, {}
        self._policy.routers.check(batch)
        samples = np.arange(batch.num_samples)
        self._now = with_factor(self._loss, self.kl_factor * decayed(self._loss.kl, batch.stage_step)) if batch.kind == "rl" else self._loss
        roles = needed_roles(batch, self._now, min(self._minibatches, len(np.unique(batch.tasks))))
        # Sorted: every rank must come to each sum in the same order, and a set's order is that of its process.
        found: dict[Role, npt.NDArray[np.float32]] = {}
        ends: npt.NDArray[np.float32] | None = None
        for role in sorted(roles - {Role.ENERGY}):
            start_s = time.perf_counter()
            if role == Role.VALUE and self._loss.bootstrap_truncated:
                found[role], ends = self._values(batch)
            else:
                found[role] = self.score(batch, role, batch.loss_mask, samples)
            if role in _SCORING:
                self.times[_SCORING[role]] = time.perf_counter() - start_s
        scores = Scores(
            proximal=found.get(Role.PROXIMAL),
            reference=found.get(Role.REFERENCE),
            teacher=found.get(Role.TEACHER),
            values=found.get(Role.VALUE),
            energy=self._energies(batch, found[Role.PROXIMAL]) if Role.ENERGY in roles else None,
            ends=ends,
        )
        return make_objective(batch, self._now, self._minibatches, scores)

    def adapt(self, objective: Objective, metrics: Mapping[str, float]) -> None:
        """After a batch that the policy has learnt from: the KL's coefficient of the next one, see `loss.kl.target`."""
        if not self._loss.kl.target:
            return
        total = float(np.mean([weights.sum() for weights in objective.weights]))
        self.kl_factor = adapted(self._loss.kl, self.kl_factor, measured_kl(self._loss.kl, metrics, total))

    def run(self, batch: TrainBatch, objective: Objective, rate: float, *, learns: bool) -> Updated:
        """The optimizer steps of a batch; without `learns` those of the critic alone."""
        start_s = time.perf_counter()
        loss, policy, whole = self._now, self._policy, self._whole if batch.kind == "rl" else None
        layout = self._layout(batch, *self._trained)
        all_logprobs, all_weights = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
        factor = weight_factor(batch, objective, self._loss.correction)
        rows: list[dict[str, float]] = []
        finite = True
        with reproducible(self._deterministic):
            for index, samples in enumerate(objective.steps):
                sums: dict[str, float] = {"train/loss": 0.0, DROPPED: 0.0}
                told: list[Told] = []
                wanted = objective.weights[index] > 0
                decision = self._decide(batch, objective, index)
                if whole is not None:
                    wanted = whole.wanted(batch, wanted)
                micros = micro_batches(batch, wanted, samples, layout, policy.width, self.budget, self._parallel)
                self._balancing.begin(batch, micros, learns=learns)
                for place, micro in enumerate(policy.turns(micros, learns=learns)):
                    self._balancing.at(batch, micro)
                    policy.accumulate(last=place == len(micros) - 1)
                    if not len(micro.target):
                        self._idle(batch, micro, learns=learns)
                        continue
                    with torch.set_grad_enabled(learns):
                        if whole is not None:
                            measures, found, target = whole.learn(policy, batch, objective, index, micro)
                            values = torch.tensor(list(measures.values()), dtype=torch.float64)
                            told.append(Told(Sums(tuple(measures), values), target, torch.from_numpy(found)))
                        else:
                            far = loss.dppo_divergence if batch.kind == "rl" and likeliest_of(loss) else None
                            logprobs, entropy, *apart = policy.predict(
                                micro, batch, entropy_gradient=loss.entropy_coef != 0, divergence=far
                            )
                            if batch.kind == "sft":
                                terms = demonstration_terms(logprobs, entropy)
                            else:
                                progress = index / len(objective.steps)
                                # At the first step the policy is pi_proximal; scored in another layout it would differ by rounding.
                                before = objective.scores.proximal if index else None
                                tokens, dropped = policy_tokens(
                                    batch,
                                    objective,
                                    micro.target,
                                    logprobs,
                                    entropy,
                                    loss,
                                    proximal=before,
                                    progress=progress,
                                    decision=decision,
                                    apart=apart[0] if apart else None,
                                )
                                surrogate, measured = self._policy_loss(tokens, loss)
                                terms = policy_terms(surrogate, measured, tokens, dropped, loss, factor)
                            learned = terms.learn(objective.weights[index][micro.target])
                            told.append(Told(learned, micro.target, logprobs.detach(), terms.weights))
                told.extend(self._teach(objective, index, micros))
                for one in told:
                    for name, value in one.sums.read().items():
                        sums[name] = sums.get(name, 0.0) + value
                    if one.logprobs is not None:
                        all_logprobs[one.target] = one.logprobs.double().cpu().numpy()
                    if one.weights is not None:
                        all_weights[one.target] = one.weights.double().cpu().numpy()
                sums = self._parallel.sum_named(sums) | self._balancing.metrics() | (decision.metrics if decision else {})
                step_rate, scaling = self._rate(batch, rate, all_logprobs, samples) if learns else (rate, {})
                norms, applied = self._apply(step_rate, batch.kind, learns=learns)
                finite = finite and applied
                rows.append(sums | scaling | norms | {"train/global_batch_size": float(len(samples))})
        metrics = step_means(rows)
        metrics[DROPPED] = float(sum(row[DROPPED] for row in rows))
        if batch.kind == "rl":
            metrics |= coefficient(loss)
        if batch.routed_experts is not None:
            metrics["train/routing_replayed"] = float((batch.routed_experts >= 0).all((1, 2)).mean())
        metrics |= candidate_metrics(batch, support=self._replays, likeliest=likeliest_of(loss) > 0) if batch.kind == "rl" else {}
        if policy.device.type == "cuda":
            torch.cuda.current_stream(policy.device).synchronize()  # the last optimizer step may be on its way
        self.times["perf/actor_train_time"] = time.perf_counter() - start_s
        gradient, fault = self._judge(batch, objective, rows, finite=finite) if learns and batch.kind == "rl" else (SOME, "")
        return Updated(metrics, finite, self._everyones(all_logprobs), self._everyones(all_weights), factor, gradient, fault)

    def _judge(self, batch: TrainBatch, objective: Objective, rows: Sequence[Mapping[str, float]], *, finite: bool) -> tuple[Gradient, str]:
        """Tell what became of the gradient of a batch's optimizer steps, and what a function of the user's has to do with it."""
        users = self._users
        spoken, broken = (1.0, 0.0) if users is None else self._parallel.sum(users.take()).tolist()
        if users is not None and not finite:
            return SOME, f"{users.reference} has given a gradient that is not finite" if broken else ""
        norms = [row["train/grad_norm"] for row in rows]
        return judge_gradient(batch, objective, self._loss, norms, spoken=spoken > 0) if finite else (SOME, "")

    def discard(self) -> None:
        """Forget what has been summed of a batch that is begun again."""
        self._balancing.end()
        self._optimizer.discard()
        if self._critic is not None:
            self._critic.discard()

    def score(self, batch: TrainBatch, role: Role, wanted: Bools, samples: Indices) -> npt.NDArray[np.float32]:
        """[T] log-probs (for `value` the critic's values) of the `wanted` tokens of `samples`, 0 elsewhere.

        Raises:
            TrainingError: there is no such model.
        """
        return self._scored(batch, role, wanted, samples)[0]

    def _scored(
        self, batch: TrainBatch, role: Role, wanted: Bools, samples: Indices, *, entropies: bool = False
    ) -> npt.NDArray[np.float32]:
        """[1, T] what `score` says; with `entropies`, not for `value`, [2, T]: those of the model's distributions are the second row."""
        critic = self._critic if role == Role.VALUE else None
        models = {Role.POLICY: self._policy, Role.PROXIMAL: self._policy, **self._frozen}
        if self._critic is not None:
            models[Role.VALUE] = self._critic.body
        if (model := models.get(role)) is None:
            raise TrainingError(
                f"expected role {', '.join(models)}, got {role}", hint="the section loss says which models a trainer holds", role=str(role)
            )
        found = torch.zeros(1 + entropies, batch.num_tokens)
        with torch.no_grad(), reproducible(self._deterministic):
            micros = micro_batches(batch, wanted, samples, self._layout(batch, model), model.width, self.budget, self._parallel)
            told: list[tuple[MicroBatch, Tensor]] = []
            for micro in model.turns(micros, learns=False):
                if model is self._policy:
                    model.routers.route(batch, model.share(micro).micro, model.device)
                if critic is None:
                    told.append((micro, torch.stack(model.predict(micro, batch)[: 1 + entropies])))
                else:
                    told.append((micro, critic.values(micro)[None]))
            self._policy.routers.free()
            for micro, one in told:
                found[:, torch.from_numpy(micro.target)] = one.float().cpu()
        return self._parallel.sum_rows(found).numpy()

    def _values(self, batch: TrainBatch) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The critic's values of the trained tokens, [T], and of the states behind truncated samples, [N], 0 elsewhere."""
        truncated, samples = truncated_samples(batch), np.arange(batch.num_samples)
        behind = np.zeros(batch.num_samples, np.float32)
        if not truncated.any():
            return self.score(batch, Role.VALUE, batch.loss_mask, samples), behind
        longer, ends = with_ends(batch, truncated)
        wanted = longer.loss_mask.copy()
        wanted[ends] = True
        values = self.score(longer, Role.VALUE, wanted, samples)
        behind[truncated] = values[ends]
        return np.delete(values, ends), behind

    def _energies(self, batch: TrainBatch, logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """[T] `token_energies` of the trained tokens, over the whole vocabulary also where what was sampled from was cut."""
        warm = uncut(batch)
        cold, samples = replace(warm, temperature=batch.temperature / 2), np.arange(batch.num_samples)
        if warm is not batch:
            logprobs = self.score(warm, Role.PROXIMAL, batch.loss_mask, samples)
        return token_energies(logprobs, self.score(cold, Role.PROXIMAL, batch.loss_mask, samples), batch.temperature)

    def row_length(self, batch: TrainBatch, budget: int) -> int:
        """Of the batch's packed rows with this budget; 0 where rows are not packed."""
        return self._packed(batch, budget) if all(model.packs for model in self._trained) else 0

    def _idle(self, batch: TrainBatch, micro: MicroBatch, *, learns: bool) -> None:
        """An empty micro-batch: for the ranks that have one with tokens, the layers must be gathered here too."""
        with torch.set_grad_enabled(learns):
            logprobs = self._policy.predict(micro, batch)[0]
        if learns:
            logprobs.backward(torch.zeros_like(logprobs))

    def _layout(self, batch: TrainBatch, *models: LanguageModel) -> Layout:
        """What all of these models can be run on."""
        if all(model.packs for model in models):
            return Layout(False, self._packed(batch, self.budget))
        return Layout(all(model.free_masks for model in models), 0)

    def _packed(self, batch: TrainBatch, budget: int) -> int:
        return self._parallel.mesh.whole(packed_row_length(batch, budget, self.least_row))

    def _decide(self, batch: TrainBatch, objective: Objective, index: int) -> Decision | None:
        """What is decided over all of a step's tokens, from the policy as it is before the step; equal on all ranks."""
        if batch.kind == "sft" or not decides(self._loss):
            return None
        weights = objective.weights[index]
        wanted = (weights > 0) & objective.finite
        logprobs, entropies = self._scored(batch, Role.POLICY, wanted, objective.steps[index], entropies=True)
        return decide(
            batch,
            self._loss,
            weights,
            objective.finite,
            logprobs=logprobs,
            entropies=entropies,
            advantages=objective.advantages,
            step=index,
        )

    def _teach(self, objective: Objective, index: int, micros: Sequence[MicroBatch]) -> Iterator[Told]:
        """The critic's part of an optimizer step, where there is a critic.

        It goes through the micro-batches behind the policy: the stages of a pipeline run all of one model's at a time.
        """
        critic, values = self._critic, objective.scores.values
        if critic is None or objective.returns is None or values is None:
            return
        kept = np.where(objective.finite, objective.weights[index], 0.0)
        for place, micro in enumerate(critic.body.turns(micros, learns=True)):
            critic.accumulate(last=place == len(micros) - 1)
            if len(micro.target):
                weights = on_device(kept[micro.target], self._policy.device)
                yield Told(critic.learn(micro, weights, values, objective.returns), micro.target)
            else:
                critic.idle(micro)

    def _rate(self, batch: TrainBatch, rate: float, logprobs: npt.NDArray[np.float64], samples: Indices) -> tuple[float, dict[str, float]]:
        """The rate of one optimizer step, by the log-probs that its forward passes gave on all ranks, and what scaled it."""
        if batch.kind == "sft" or self._config.ess_scaling == "off":
            return rate, {}
        everyones = self._everyones(logprobs.copy())
        # One rank's number for all that share the batch: exp may differ in its last bit between hosts, and then copies of the model would.
        own = rollout_ess(batch, everyones, samples) if self._parallel.data_rank == 0 else 0.0
        ess = float(self._parallel.sum(torch.tensor([own], dtype=torch.float64)))
        return scaled_rate(rate, ess, self._config), {"train/ess_rollout": ess}

    def _apply(self, rate: float, kind: str, *, learns: bool) -> tuple[dict[str, float], bool]:
        """One step of the policy, where it learns, and of the critic; the gradients' norms, and whether all were finite."""
        norms = {"train/grad_norm": 0.0, "train/lr": rate if learns else 0.0}
        applied = True
        if learns:
            gradients = self._optimizer.gradients()
            self._parallel.sum_gradients(gradients)
            if self._direction is not None and (cosine := self._direction.turned(kind, gradients)) is not None:
                norms["train/grad_cosine"] = cosine
            self._settle()
            self.wrote = True
            norms["train/grad_norm"], applied = self._optimizer.step(rate)
            self._policy.forget()
        if kind == "rl" and self._critic is not None:
            self._critic.sum_gradients()
            self._settle()
            self.wrote = True
            norms["train/value_grad_norm"], also = self._critic.step()
            norms["train/value_norm"] = self._critic.norm()
            applied = applied and also
        return norms, applied

    def _everyones(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum over ranks, which of several is written into `values` too."""
        return self._parallel.sum_rows(torch.from_numpy(values)).numpy()
