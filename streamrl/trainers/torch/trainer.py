"""The `torch` trainer: a Hugging Face causal language model under AdamW, on one rank or a mesh of several, CPU or GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from streamrl.algorithms.batch_metrics import ratio_metrics, weight_metrics
from streamrl.algorithms.groups import rollout_mean, rollout_of_sample
from streamrl.algorithms.objective import DISTANCE, Objective, answer_probability, check_batch, logprob_differences
from streamrl.config.loss import estimator_of
from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig, TrainerConfig
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.core.packing import Indices
from streamrl.errors import TrainingError
from streamrl.models.checkpoint import (
    TorchState,
    host_copy,
    random_state,
    read_checkpoint,
    restore_random,
)
from streamrl.models.description import copy_description
from streamrl.models.directories import write_directory
from streamrl.models.tensor_files import host_bytes
from streamrl.schemas.versions import Version
from streamrl.tensors.digest_torch import NamedDigester, NamedDigests, Region
from streamrl.tensors.mesh import mesh_of
from streamrl.trainers.flops import peak_flops
from streamrl.trainers.protocol import StepResult, TokenValues, out_of_memory
from streamrl.trainers.torch.arrangement import Arrangement
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.critic import Critic, LoadValues, TorchValues
from streamrl.trainers.torch.frozen import Load, Reference, load_frozen, load_torch
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.profiling import StepProfiler
from streamrl.trainers.torch.recheck import Recheck
from streamrl.trainers.torch.saving import Saving
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.trainers.torch.terms import DROPPED, Updated
from streamrl.trainers.torch.update import Update
from streamrl.weights.protocol import Shard

GLANCE_EVERY, GLANCE_EVERY_GPU = 16, 64
"""Versions of which one is kept to be scored again (`Recheck`): on a GPU it is copied to the host and back."""
COPY_WAIT = "perf/checkpoint_wait_s"
"""Metric of the time that the optimizer waited for a checkpoint's copies."""


class TorchTrainer:
    """Implements `streamrl.trainers.protocol.Trainer`. Not thread-safe: one thread calls it.

    Equal state, batch, thread count and software give equal bits. The optimizer's moments begin anew whenever the kind of
    batch changes, so the end of the warm-up needs no state but the kind itself.

    Args:
        model_dir: Hugging Face directory of the initial policy.
        trainer: this backend's section.
        loss: the objective.
        learning_rate: the rate of a batch's optimizer steps.
        kernels: by which the models are run.
        dtype: type of the parameters; below float32 the optimizer holds float32 masters.
        device: where they lie.
        deterministic: refuse kernels that are not reproducible.
        snapshots: buffers that `shards` copies to on a GPU.
        recheck_versions: see `Recheck`.
        memory_tokens: see `DebugConfig`.
        profiler: of steps.
        policy: the model, where another library runs it; None: transformers does.
        load_frozen_model: how it loads reference and teacher.
        load_values: how it loads the critic's model.
        parallel: its ranks.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        trainer: TrainerConfig,
        loss: LossConfig,
        learning_rate: Callable[[TrainBatch], float],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        snapshots: int = 2,
        recheck_versions: int = 1,
        memory_tokens: int = 0,
        profiler: StepProfiler | None = None,
        policy: LanguageModel | None = None,
        load_frozen_model: Load | None = None,
        load_values: LoadValues | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._loss = loss
        self._learning_rate = learning_rate
        self._parallel = parallel or Parallel(mesh_of(trainer), device, trainer.gather)
        self.policy = policy or CausalLM(model_dir, dtype, device, kernels=kernels)
        if memory_tokens:
            self.policy.limit_memory(memory_tokens)
        self._flops = self.policy.flops
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(dtype).removeprefix("torch."))
        self.held = self.policy.cut(self._parallel, trained=True)
        self.parameters = self.held.parameters
        self._critic: Critic | None = None
        if Role.VALUE in estimator_of(loss).needs:
            values = load_values or partial(TorchValues, dtype=dtype, device=device, kernels=kernels, parallel=self._parallel)
            self._critic = Critic(values, model_dir, config=loss.critic, optimizer=trainer.optimizer)
        cuda = device.type == "cuda"
        self._snapshots = SnapshotRing(self.held.published(), device, slots=snapshots) if cuda else None
        self._digester: NamedDigester | None = None
        if cuda and not self._parallel.sharded and all(one.held.dtype == one.dtype for one in self.held.published()):
            self._digester = NamedDigester({one.name: Region(one.held, one.shape) for one in self.held.published()})
        self.optimizer = ClippedAdamW(self.parameters, trainer.optimizer, norm=self._parallel.norm)
        load = load_frozen_model or partial(load_torch, dtype=dtype, device=device, kernels=kernels)
        frozen = load_frozen(loss, model_dir, load, vocab_size=self.policy.vocab_size, parallel=self._parallel)
        self._reference: Reference | None = None
        if loss.kl.reference_every:
            self._reference = Reference(frozen[Role.REFERENCE], self.held, every=loss.kl.reference_every)
        self.update = Update(
            loss,
            trainer,
            policy=self.policy,
            optimizer=self.optimizer,
            frozen=frozen,
            critic=self._critic,
            parallel=self._parallel,
            deterministic=deterministic,
            settle=self._settle,
        )
        kept = recheck_versions if trainer.check_logprobs else 0
        wide = self._parallel.sharded or any(p.itemsize > dtype.itemsize for _, p in self.parameters)
        if kept and wide:  # in float32, and the parameters' own beside the one that is in their place
            kept = (kept + 1) * 4 // dtype.itemsize
        self._arrangement = Arrangement(
            kernels,
            trained=[self.policy, *([self._critic.body] if self._critic is not None else [])],
            frozen=list(dict.fromkeys(frozen.values())),
            parallel=self._parallel,
            budget=trainer.micro_tokens,
            deterministic=deterministic,
            copies=(snapshots if cuda else 0) + kept + (4 // dtype.itemsize if trainer.gradient_cosine else 0),
        )
        # FlashAttention knows no float32.
        widen = kernels.attention != "flash"
        self._recheck = Recheck(
            self.parameters,
            samples=trainer.check_logprobs,
            versions=recheck_versions,
            every=(GLANCE_EVERY_GPU if cuda else GLANCE_EVERY) if policy is None and not self._parallel.sharded else 0,
            widen=widen,
            written=self.policy.forget,
            free_bytes=self._parallel.free_bytes if cuda else None,
        )
        self._micro_tokens = trainer.micro_tokens
        self._profiler = profiler
        self._stage = ""
        self._known: NamedDigests | None = None
        """Of the parameters as they are, on a GPU; None when nobody has asked since they were written."""
        self._saving = Saving(self._parallel, device)

    def step(self, batch: TrainBatch) -> StepResult:
        """See `Trainer.step`. Metrics are means over the batch's optimizer steps, weighted as the loss is.

        Where memory does not reach, the micro-batches' budget is halved and the step repeated, unless an optimizer has written: that, and
        several ranks, is for the caller, who begins again with all ranks from a checkpoint.
        """
        check_batch(batch)
        self.update.budget = batch.micro_tokens or self._micro_tokens
        with self._profiler.step(batch.version.number + 1) if self._profiler is not None else nullcontext(), self._parallel.gathering():
            self.update.least_row = self._arrangement.least_row(batch.choices)
            rows = self.update.row_length(batch, self.update.budget)
            self._arrangement.follow(batch.choices, rows or self._micro_tokens)
            while True:
                try:
                    objective, learns = self._begin(batch)
                    done = self.update.run(batch, objective, self._learning_rate(batch), learns=learns)
                    if learns and batch.kind == "rl":
                        self.update.adapt(objective, {**objective.metrics, **done.metrics})
                    return self._result(batch, objective, done)
                except torch.OutOfMemoryError as error:
                    budget = self._repeatable(batch, error)
                # Only here the error, whose frames hold on to the pass's memory, is gone.
                self.update.discard()
                if self.policy.device.type == "cuda":
                    torch.cuda.empty_cache()
                self.update.budget = budget

    def _begin(self, batch: TrainBatch) -> tuple[Objective, bool]:
        """The batch's objective, and whether the policy learns from it; begun again where a step is repeated."""
        if self._reference is not None and self._reference.due(batch):
            self._settle()
            self._reference.renew(self.digest())
        self._known = None
        objective = self.update.prepare(batch)
        if batch.kind != self._stage:
            self.optimizer.reset()
            self._stage = batch.kind
        self._recheck.keep(batch.version.number)
        return objective, self._learns(batch)

    def _learns(self, batch: TrainBatch) -> bool:
        """Whether the policy does; a critic's first batches are its own."""
        return batch.kind == "sft" or batch.stage_step >= self._loss.critic.only_steps

    def _repeatable(self, batch: TrainBatch, error: torch.OutOfMemoryError) -> int:
        """The budget that the step is repeated with, after fewer layers keep their activations; raises OutOfMemory where it may not be."""
        budget, longest = self.update.budget, int(batch.lengths.max())
        alone = not self.update.wrote and self._parallel.ranks == 1
        if alone and self._arrangement.keep_fewer():  # which changes no digit, as another budget does
            return budget
        # A packed row may be shorter than the budget, which then is cut below the row.
        now = self.update.row_length(batch, budget) or max(budget, longest)
        half = now // 2
        if (self.update.row_length(batch, half) or max(half, longest)) >= now:
            half = 0
        if not half or not alone:
            raise out_of_memory(batch, now, half, longest, str(error)) from error
        return half

    def _result(self, batch: TrainBatch, objective: Objective, done: Updated) -> StepResult:
        metrics = {**objective.metrics, **done.metrics}
        score = answer_probability(batch, done.logprobs) if batch.kind == "sft" else None
        if score is not None:
            metrics["train/answer_probability"] = score
        else:
            metrics |= self._batch_metrics(batch, objective, done)
        dropped = done.metrics[DROPPED]
        finite = done.finite and (dropped == 0 or dropped < batch.loss_mask.sum())
        reference = self._reference.digest if self._reference is not None else ""
        times = dict(self.update.times)
        if (waited_s := self._saving.take_waited_s()) is not None:
            times[COPY_WAIT] = waited_s
        return StepResult(
            digest=self.digest(),
            metrics=metrics,
            times=times,
            finite=bool(finite),
            gradient=done.gradient,
            fault=done.fault,
            score=score,
            reference=reference,
            micro_tokens=self.update.budget,
            peak_s=self._peak_s(batch),
            choices=self._arrangement.choices(self.update.row_length(batch, self.update.budget)),
            notices=(*self._arrangement.notices(), *self._recheck.notices()),
            tokens=None if batch.kind == "sft" or self._loss.of_logits else TokenValues(done.logprobs, done.weights, objective.advantages),
        )

    def _peak_s(self, batch: TrainBatch) -> float | None:
        if self._flops is None or self._peak is None or not self._learns(batch):
            return None
        return self._flops.step(batch.lengths, int(batch.loss_mask.sum())) / (self._peak * self._parallel.ranks)

    def digest(self) -> str:
        """See `Trainer.digest`."""
        if self._snapshots is None:
            return self.held.digest()
        # Of a model that is cut, of the rows as they are rounded, which is what a snapshot will have of them.
        self._known = self._digester.digests() if self._digester is not None else self.held.digests()
        return self._parallel.digest(self._known.elements)

    def shards(self) -> Iterator[Shard]:
        """See `Trainer.shards`.

        On a CPU all are copied before this returns. On a GPU they are when the first is drawn: into a buffer beside the training stream,
        and the parameters are not written before that is done.
        """
        if self._snapshots is not None:
            return self._snapshots.shards(self._known)
        return iter(
            [
                Shard(
                    name=one.name,
                    dtype=str(one.dtype).removeprefix("torch."),
                    global_shape=one.shape,
                    offset=one.offset,
                    data=host_bytes(host_copy(one.held).to(one.dtype)),
                    shape=tuple(one.held.shape),
                )
                for one in self.held.published()
            ]
        )

    def save(self, path: Path, extra: bytes, *, version: Version, beside: Mapping[str, bytes] | None = None) -> Future[None]:
        """See `Trainer.save` and `Saving.save`."""
        return self._saving.save(path, partial(self._state, version), extra, beside)

    def _state(self, version: Version) -> TorchState:
        return TorchState(
            policy=self.held.state(self.optimizer.state(), self.digest()),
            critic=self._critic.state() if self._critic is not None else None,
            random=random_state(self.policy.device),
            stage=self._stage,
            version=str(version),
            reference=self._reference.state() if self._reference is not None else None,
            kl_factor=self.update.kl_factor,
        )

    def load(self, path: Path) -> bytes:
        """See `Trainer.load`; of several ranks each reads what it holds, and the caller has looked at all files."""
        parallel = self._parallel
        boxes = {**self.held.boxes, **(self._critic.boxes if self._critic is not None else {})}
        state, extra = read_checkpoint(path, parallel.mesh, parallel.part, check=parallel.ranks == 1, boxes=boxes)
        self.held.check(state.policy, path, "parameters")
        self._settle()
        if self._critic is not None:
            if state.critic is None:
                raise TrainingError(
                    f"expected a critic in the checkpoint {path}, got none: it is of a run without loss.advantage = ppo",
                    hint="begin from the initial weights",
                    path=str(path),
                    what="a critic",
                )
            self._critic.restore(state.critic, path)
        if self._reference is not None and state.reference is not None:  # a branch's parent may never have renewed it
            self._reference.restore(state.reference, path)
        self._known = None
        self.held.take(state.policy.parameters)
        self.policy.forget()
        self.optimizer.restore(state.policy.optimizer)
        self._stage = state.stage
        self.update.kl_factor = state.kl_factor if self._loss.kl.target else 1.0  # a branch may have left the target out
        restore_random(state.random, self.policy.device)
        return extra

    def export(self, path: Path) -> None:
        """See `Trainer.export`: a Hugging Face directory with weights, configuration and tokenizer. All ranks of a cut model call it."""
        parameters = self.held.copies() if self._parallel.sharded else None
        if self._parallel.rank != 0:
            return

        def write(directory: Path) -> None:
            self.policy.save_pretrained(directory, parameters)
            copy_description(self._model_dir, directory)

        write_directory(path, write)

    def _logprobs(self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices) -> npt.NDArray[np.float32]:
        return self.update.score(batch, Role.POLICY, wanted, samples)

    def _batch_metrics(self, batch: TrainBatch, objective: Objective, done: Updated) -> dict[str, float]:
        """What only a whole batch of sampled tokens gives."""
        if self._parallel.sharded:
            self._settle()  # the recheck writes a cut model's parameters, and the step may have written none
        scores = objective.scores
        before = done.logprobs if scores.proximal is None else scores.proximal
        arrays = {"rollout/log_probs": before, "rollout/rollout_log_probs": batch.sampler_logprobs}
        if scores.reference is not None:
            arrays["rollout/ref_log_probs"] = scores.reference
        mask, owner = batch.loss_mask & objective.finite, rollout_of_sample(batch.tasks, batch.rollouts)[sample_of_token(batch)]
        return {
            **{name: rollout_mean(values.astype(np.float64), mask, owner) for name, values in arrays.items()},
            **ratio_metrics(batch, before),
            **({} if self._loss.of_logits else weight_metrics(batch, done.weights, factor=done.factor)),
            **self._distances(batch, before),
        }

    def _distances(self, batch: TrainBatch, before: npt.NDArray[np.floating]) -> dict[str, float]:
        """Measure how far the sampler was away with the same weights: in samples of the newest, in those that are asked for, or a few."""
        found = logprob_differences(batch, before) | self._recheck.measure(batch, self._logprobs)
        return found if DISTANCE in found else found | self._recheck.glance(batch, self._logprobs)

    def _settle(self) -> None:
        """Before parameters and moments are written: let copies of them be complete."""
        self._saving.settle()
        if self._snapshots is not None:
            self._snapshots.settle()
