"""The inside of an optimizer step: forward and backward passes over its micro-batches, for the policy and its critic together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.objective import Objective
from streamrl.algorithms.policy_step import PolicyStep, Terms, demonstration_terms
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import Indices, MicroBatch
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.critic import Critic
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import DataParallel
from streamrl.trainers.torch.scores import Scorer
from streamrl.trainers.torch.slime_loss import SlimeLoss

DROPPED = "train/nonfinite_tokens"


class MicroSteps:
    """Knows the models and the loss; `begin` gives what accumulates over one batch."""

    def __init__(
        self,
        loss: LossConfig,
        policy: CausalLM,
        optimizer: ClippedAdamW,
        critic: Critic | None,
        scorer: Scorer,
        parallel: DataParallel,
    ) -> None:
        self.loss = loss
        self.policy = policy
        self.optimizer = optimizer
        self.critic = critic
        self.scorer = scorer
        self.parallel = parallel
        self.policy_step = PolicyStep(loss)
        self.slime = SlimeLoss(loss) if loss.slime_loss else None
        self.free_masks = policy.free_masks and (critic is None or critic.free_masks)

    def begin(self, batch: TrainBatch, objective: Objective) -> Accumulation:
        """Nothing accumulated yet."""
        return Accumulation(self, batch, objective)


class Accumulation:
    """Gradients and sums of one batch, optimizer step by optimizer step. Letters: `T` tokens of the batch, `M` of a micro-batch."""

    def __init__(self, steps: MicroSteps, batch: TrainBatch, objective: Objective) -> None:
        self._steps = steps
        self._batch = batch
        self._objective = objective
        self._logprobs = np.zeros(batch.num_tokens)
        self._weights = np.zeros(batch.num_tokens)
        self.factor = steps.policy_step.factor(batch, objective) if batch.kind == "rl" else 1.0
        """What normalisation multiplies the correction's weights by."""

    def accumulate(self, index: int, *, learns: bool) -> dict[str, float]:
        """Add up the gradients of optimizer step `index`; without `learns` those of the critic alone. Returns the sums over all ranks."""
        steps, batch, objective = self._steps, self._batch, self._objective
        sums: dict[str, float] = {"train/loss": 0.0, DROPPED: 0.0}
        wanted = objective.weights[index] > 0
        slime = steps.slime if batch.kind == "rl" else None
        if slime is not None:
            wanted = slime.wanted(batch, wanted)
        micros = steps.scorer.micro_batches(batch, wanted, objective.steps[index], free_masks=steps.free_masks, width=steps.policy.width)
        for micro in micros:
            with torch.set_grad_enabled(learns):
                if slime is not None:
                    found, logprobs, target = slime.learn(steps.policy, batch, objective, index, micro)
                    self._logprobs[target] = logprobs
                else:
                    found = self._learn(index, micro)
            if learns:
                steps.optimizer.collect()
            found |= self._teach(index, micro)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        return steps.parallel.sum_named(sums)

    def logprobs(self) -> npt.NDArray[np.float64]:
        """[T] log-probs of the trained tokens as their optimizer step had them."""
        return self._everyones(self._logprobs)

    def weights(self) -> npt.NDArray[np.float64]:
        """[T] what the policy loss of the trained tokens was multiplied by."""
        return self._everyones(self._weights)

    def _learn(self, index: int, micro: MicroBatch) -> dict[str, float]:
        steps, batch, objective = self._steps, self._batch, self._objective
        logprobs, entropy = steps.policy.predict(micro, batch, entropy_gradient=steps.loss.entropy_coef != 0)
        terms = self._terms(index, micro.target, logprobs, entropy)
        weights = torch.from_numpy(objective.weights[index][micro.target]).to(logprobs.device)
        if logprobs.requires_grad:
            (terms.loss * weights.to(terms.loss.dtype)).sum().backward()
        names = list(terms.metrics)
        sums = torch.stack([terms.metrics[name].double() for name in names]) @ weights
        count = terms.dropped.sum().double()
        self._logprobs[micro.target] = logprobs.detach().double().cpu().numpy()
        self._weights[micro.target] = terms.weights.double().cpu().numpy()
        found = dict(zip([*names, DROPPED], torch.cat([sums, count[None]]).cpu().tolist(), strict=True))
        return found

    def _teach(self, index: int, micro: MicroBatch) -> dict[str, float]:
        """The critic's part."""
        objective, critic = self._objective, self._steps.critic
        if critic is None or objective.returns is None or objective.scores.values is None:
            return {}
        kept = np.where(objective.finite, objective.weights[index], 0.0)[micro.target]
        return critic.learn(micro, torch.from_numpy(kept).to(self._steps.policy.device), objective.scores.values, objective.returns)

    def _terms(self, index: int, target: Indices, logprobs: Tensor, entropy: Tensor) -> Terms:
        if self._batch.kind == "sft":
            return demonstration_terms(logprobs, entropy)
        return self._steps.policy_step.terms(
            self._batch,
            self._objective,
            target,
            logprobs,
            entropy,
            progress=index / len(self._objective.steps),
            factor=self.factor,
        )

    def _everyones(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._steps.parallel.sum(torch.from_numpy(values.copy())).numpy()
