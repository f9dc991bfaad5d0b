"""Losses with slime's signature, (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), in place of streamrl's own.

Such a function wants the logits of whole sequences, so those of a micro-batch are in memory at once, [tokens, V] in float32: keep
`trainer.micro_tokens` small. Letters: `M` tokens that a micro-batch predicts, `S` its samples, `L` their tokens together, `V` vocabulary.

What the function is given:

- `args`: slime's names for what `loss` says (`eps_clip`, `eps_clip_high`, `eps_clip_c`, `entropy_coef`, `use_kl_loss`, `kl_loss_coef`,
  `kl_loss_type`, `use_unbiased_kl`, `kl_coef`, `use_tis`, `tis_clip`, `tis_clip_low`, `use_rollout_logprobs`, `advantage_estimator`,
  `calculate_per_token_loss`, `gamma`, `lambd`, `value_clip`). `rollout_temperature` is 1: the logits are over each sample's own already.
- `batch`: lists with one entry a sample. `unconcat_tokens`: token ids, prompt first; `total_lengths`, `response_lengths`: ints, where a
  response goes from the first trained token to the last; `loss_masks`, `advantages`, `log_probs` (the trainer's before the batch's first
  step), `rollout_log_probs`, and where there are such numbers `returns`, `ref_log_probs`, `teacher_log_probs`, `values`: tensors over the
  response; `rewards`: floats; `sample_indices`: ints. `tokens`: [1, L], all samples one after the other.
- `logits`: [1, L, V]; those at a token predict the next one. A sample's last row is 0: nothing of it is wanted.
- `sum_of_sample_mean(x)`: x [sum of response lengths] to a scalar: the mean over each rollout's trained tokens (or what `loss.reduction`
  says), added up over rollouts.

Loss and metrics are sums over rollouts and are divided by their number in the optimizer step, whatever the micro-batches and ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.groups import rollout_of_sample
from streamrl.algorithms.objective import Objective
from streamrl.bridges.slime.flags import loss_flags
from streamrl.config.plugins import named_failures, resolve
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch, sample_of_token, samples_at
from streamrl.core.packing import Indices, MicroBatch
from streamrl.errors import ConfigError
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.terms import PASSED

_KEY = "loss.slime_loss"


class SlimeLoss:
    """Calls the function that `loss.slime_loss` names, micro-batch by micro-batch; raises ConfigError when there is none."""

    def __init__(self, loss: LossConfig) -> None:
        self.reference = self._name = loss.slime_loss
        self._function: Any = resolve(loss.slime_loss, what="loss", key="loss.slime_loss")
        if not callable(self._function):
            raise ConfigError(
                f"loss.slime_loss = {self._name!r} must name a function, got a {type(self._function).__name__}", key="loss.slime_loss"
            )
        self._args = slime_args(loss)
        self._counts = torch.zeros(2, dtype=torch.float64)

    def take(self) -> Tensor:
        """[2] of the calls since this was asked last: losses that are not 0, and gradients that are not finite."""
        found, self._counts = self._counts, torch.zeros(2, dtype=torch.float64)
        return found

    def wanted(self, batch: TrainBatch, trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[T] all tokens, but each sample's first one, up to the last trained one of each sample that has any."""
        last = np.full(batch.num_samples, -1, np.int64)
        found = np.flatnonzero(trained)
        last[samples_at(batch, found)] = found  # ascending, so the last one of each sample stays
        wanted = np.arange(batch.num_tokens) <= last[sample_of_token(batch)]
        wanted[batch.offsets[:-1]] = False
        return wanted

    def learn(
        self, policy: LanguageModel, batch: TrainBatch, objective: Objective, index: int, micro: MicroBatch
    ) -> tuple[dict[str, float], npt.NDArray[np.float64], Indices]:
        """One micro-batch of optimizer step `index`, with its gradient where gradients are on.

        Returns:
            The metrics' sums, and the log-probs of its trained tokens with their indices in the batch.

        Raises:
            ConfigError: the function gives no scalar loss, one without a gradient, or a metric that is no number.
        """
        order = np.argsort(micro.target)
        target = micro.target[order]
        logits = policy.logits(micro, batch)[torch.from_numpy(order).to(policy.device)]
        layout = _Layout(batch, objective, index, target)
        data = layout.data(batch, objective, logits)
        weights = torch.as_tensor(layout.weights, dtype=logits.dtype, device=logits.device)
        rollouts = len(np.unique(rollout_of_sample(batch.tasks, batch.rollouts)[objective.steps[index]]))

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            # Filled first: what is left out may be NaN.
            return (values.masked_fill(weights == 0, 0.0) * weights).sum() * rollouts

        packed = logits.new_zeros(len(layout.tokens), logits.shape[1])
        packed = packed.index_copy(0, torch.from_numpy(layout.positions - 1).to(logits.device), logits)[None]
        learns = torch.is_grad_enabled()
        with named_failures(self._name, _KEY, passed=PASSED), torch.set_grad_enabled(learns):
            loss, metrics = self._function(self._args, data, packed, sum_of_sample_mean)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._wrong(
                "a scalar loss and metrics", f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            )
        if learns:
            self._learn(loss.sum() / rollouts, logits)
        sums = {self._metric(name): self._number(name, value) / rollouts for name, value in metrics.items()}
        sums |= {"train/loss": float(loss.detach()) / rollouts, "train/nonfinite_tokens": float(layout.dropped)}
        trained = layout.trained
        chosen = logits.detach()[torch.from_numpy(trained).to(logits.device)]
        ids = torch.from_numpy(batch.tokens[target[trained]].astype(np.int64)).to(logits.device)
        logprobs = chosen.gather(-1, ids[:, None])[:, 0] - chosen.logsumexp(-1)
        return sums, logprobs.double().cpu().numpy(), target[trained]

    def _metric(self, name: str) -> str:
        return name if "/" in name else f"train/{name}"

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._wrong("numbers as metrics", f"{value!r} for {name}", metric=name) from error

    def _learn(self, loss: Tensor, logits: Tensor) -> None:
        """Take the loss's gradient, which must reach the logits."""
        reached: list[Tensor] = []
        handle = logits.register_hook(lambda gradient: reached.append(torch.isfinite(gradient).all()))
        if loss.requires_grad:
            loss.backward()
        handle.remove()
        if not reached:
            raise self._wrong("a loss with a gradient, made of the logits", "one that does not depend on them")
        self._counts += torch.tensor([float(loss.detach() != 0), float(not all(reached))], dtype=torch.float64)

    def _wrong(self, expected: str, got: str, **values: Any) -> ConfigError:
        return ConfigError(
            f"expected {self._name} to return {expected}, got {got}",
            hint="see docs/algorithms.md for what such a loss returns; it would return the same again",
            key=_KEY,
            function=self._name,
            got=got,
            **values,
        )


class _Layout:
    """Where the samples of a micro-batch stand when they are put one after the other. `target` is ascending."""

    def __init__(self, batch: TrainBatch, objective: Objective, index: int, target: Indices) -> None:
        owner = samples_at(batch, target)
        self.samples, count = np.unique(owner, return_counts=True)
        weights_T = objective.weights[index]
        known_T = objective.finite
        self.totals = count + 1  # the first token of a sample is not predicted
        starts = np.concatenate([[0], np.cumsum(self.totals)[:-1]])
        begins = batch.offsets[self.samples]
        self.positions = target - np.repeat(begins - starts, count)
        self.tokens = np.concatenate([batch.tokens[b : b + n] for b, n in zip(begins, self.totals, strict=True)])
        self.trained = np.flatnonzero(weights_T[target] > 0)
        firsts = [int(np.flatnonzero(weights_T[b : b + n] > 0)[0]) for b, n in zip(begins, self.totals, strict=True)]
        self.responses = self.totals - np.array(firsts)
        self.spans = [slice(int(b + f), int(b + n)) for b, f, n in zip(begins, firsts, self.totals, strict=True)]
        masks = [(weights_T[span] > 0) & known_T[span] for span in self.spans]
        self.masks = masks
        self.weights = np.concatenate([np.where(mask, weights_T[span], 0.0) for mask, span in zip(masks, self.spans, strict=True)])
        self.dropped = int(((weights_T[target] > 0) & ~known_T[target]).sum())

    def data(self, batch: TrainBatch, objective: Objective, like: Tensor) -> dict[str, Any]:
        """Slime's batch."""
        scores, device = objective.scores, like.device

        def spread(values_T: npt.NDArray[np.floating]) -> list[Tensor]:
            # Copies: what a function writes to them stays out of the batch.
            return [torch.tensor(values_T[span], dtype=like.dtype, device=device) for span in self.spans]

        ids = torch.from_numpy(self.tokens.astype(np.int64)).to(device)
        found: dict[str, Any] = {
            "tokens": ids[None],
            "unconcat_tokens": list(ids.split(self.totals.tolist())),
            "total_lengths": self.totals.tolist(),
            "response_lengths": self.responses.tolist(),
            "loss_masks": [torch.as_tensor(mask, dtype=torch.int, device=device) for mask in self.masks],
            "sample_indices": self.samples.tolist(),
            "rewards": batch.rewards[self.samples].tolist(),
            "advantages": spread(objective.advantages),
            "rollout_log_probs": spread(batch.sampler_logprobs),
        }
        given = {
            "log_probs": scores.proximal,
            "ref_log_probs": scores.reference,
            "teacher_log_probs": scores.teacher,
            "values": scores.values,
            "returns": objective.returns,
        }
        return found | {name: spread(values) for name, values in given.items() if values is not None}


def slime_args(loss: LossConfig) -> SimpleNamespace:
    """Slime's names for what the section `loss` says."""
    return SimpleNamespace(**{**loss_flags(loss), "rollout_temperature": 1.0})
