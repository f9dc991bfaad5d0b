"""The `torch` trainer: a Hugging Face causal language model under AdamW, one rank or data parallel, CPU or GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.config.tree import LossConfig, TrainerConfig
from streamrl.core import losses
from streamrl.core.balance import split_ranks
from streamrl.core.batches import TrainBatch
from streamrl.core.digest import combine, tensor_digest
from streamrl.core.digest_torch import Digester
from streamrl.core.packing import Indices, MicroBatch, plan_micro_batches
from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.causal_lm import CausalLM
from streamrl.trainers.checkpoints import BackgroundWriter, write_directory
from streamrl.trainers.objective import Objective, answer_probability, logprob_differences, make_objective
from streamrl.trainers.optimizer import ClippedAdamW
from streamrl.trainers.parallel import DataParallel
from streamrl.trainers.protocol import Role, StepResult
from streamrl.trainers.recheck import Recheck
from streamrl.trainers.torch_checkpoint import TorchState, host_copy, read_checkpoint, write_checkpoint
from streamrl.trainers.torch_snapshot import SnapshotRing
from streamrl.weights.protocol import Shard

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class TorchTrainer:
    """Implements `streamrl.trainers.protocol.Trainer`. Not thread-safe: one thread calls it.

    Equal state, batch, thread count and software give equal bits. The optimizer's moments begin anew whenever the kind of
    batch changes, so the end of the warm-up needs no state but the kind itself.

    Args:
        model_dir: Hugging Face directory of the initial policy.
        trainer: this backend's section.
        loss: the objective.
        learning_rate: the rate of a batch's optimizer steps.
        dtype: type of the parameters; below float32 the optimizer holds float32 masters.
        device: where they lie.
        deterministic: refuse kernels that are not reproducible.
        snapshots: buffers that `shards` copies to on a GPU.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        trainer: TrainerConfig,
        loss: LossConfig,
        learning_rate: Callable[[TrainBatch], float],
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        snapshots: int = 2,
        recheck_versions: int = 1,
    ) -> None:
        self._model_dir = model_dir
        self._config = trainer
        self._loss = loss
        self._learning_rate = learning_rate
        self._deterministic = deterministic
        self._parallel = DataParallel(trainer.ranks)
        self._policy = CausalLM(model_dir, dtype, device, attention=trainer.attention, checkpoint_layers=trainer.gradient_checkpointing)
        self._parameters = list(self._policy.parameters())
        cuda = device.type == "cuda"
        self._snapshots = SnapshotRing(self._parameters, device, slots=snapshots) if cuda else None
        self._digester = Digester([p for _, p in self._parameters]) if cuda else None
        self._optimizer = ClippedAdamW(self._parameters, trainer.optimizer)
        self._recheck = Recheck(self._parameters, samples=trainer.check_logprobs, versions=recheck_versions)
        self._stage = ""
        self._writer = BackgroundWriter()

    def score(self, batch: TrainBatch, role: Role) -> npt.NDArray[np.float32]:
        """See `Trainer.score`. `policy` and `proximal` are the current parameters; other roles raise TrainingError."""
        if role not in (Role.POLICY, Role.PROXIMAL):
            raise TrainingError(f"expected role policy or proximal, got {role}", hint="this trainer holds one model, the policy")
        wanted = np.ones(batch.num_tokens, np.bool_)
        wanted[batch.offsets[:-1]] = False
        return self._logprobs(batch, wanted, np.arange(batch.num_samples))

    def step(self, batch: TrainBatch) -> StepResult:
        """See `Trainer.step`. Metrics are means over the batch's optimizer steps, weighted as the loss is."""
        objective = make_objective(batch, self._loss, self._config.minibatches)
        if batch.kind != self._stage:
            self._optimizer.reset()
            self._stage = batch.kind
        rate = self._learning_rate(batch)
        self._recheck.keep(batch.version.number)
        old_logprobs = self.score(batch, Role.PROXIMAL) if batch.kind == "rl" and len(objective.steps) > 1 else None
        logprobs = np.zeros(batch.num_tokens)
        rows: list[dict[str, float]] = []
        finite = True
        with _reproducible(self._deterministic):
            for index in range(len(objective.steps)):
                sums = self._accumulate(batch, objective, index, old_logprobs, logprobs)
                self._parallel.sum_gradients(self._optimizer.gradients())
                self._settle()
                norm, applied = self._optimizer.step(rate)
                finite = finite and applied
                rows.append({**sums, "train/grad_norm": norm, "train/lr": rate})
        metrics = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        everyones = self._parallel.sum(torch.from_numpy(logprobs)).numpy()
        if batch.kind == "sft":
            metrics["train/answer_probability"] = answer_probability(batch, everyones)
        else:
            metrics |= logprob_differences(batch, everyones if old_logprobs is None else old_logprobs)
            metrics |= self._recheck.measure(batch, self._logprobs)
        return StepResult(digest=self.digest(), metrics={**objective.metrics, **metrics}, finite=finite)

    def digest(self) -> str:
        """Digest of the parameters as they are now, 16 hex digits."""
        if self._digester is None:
            return _digest(self._parameters)
        return combine(dict(zip([name for name, _ in self._parameters], self._digester.digests(), strict=True)))

    def shards(self) -> Iterator[Shard]:
        """See `Trainer.shards`; every rank of a data-parallel group gives the whole.

        On a CPU all are copied before this returns. On a GPU they are when the first is drawn: into a buffer beside the training
        stream, and the parameters are not written before that is done.
        """
        if self._snapshots is not None:
            return self._snapshots.shards()
        return iter(
            [
                Shard(
                    name=name,
                    dtype=str(p.dtype).removeprefix("torch."),
                    global_shape=tuple(p.shape),
                    data=host_bytes(p).copy(),
                    shape=tuple(p.shape),
                )
                for name, p in self._parameters
            ]
        )

    def save(self, path: Path, extra: bytes, *, version: Version) -> Future[None]:
        """See `Trainer.save`. Rank 0 writes, for all hold the same; on the others the future is done at once."""
        if self._parallel.rank != 0:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        state = TorchState(
            parameters={name: host_copy(p) for name, p in self._parameters},
            optimizer=self._optimizer.state(),
            random=_random_state(self._policy.device),
            stage=self._stage,
            version=str(version),
            digest=self.digest(),
        )
        return self._writer.submit(path, lambda directory: write_checkpoint(directory, state, extra))

    def load(self, path: Path) -> bytes:
        """See `Trainer.load`; raises TrainingError when `path` is no checkpoint of this model, or was damaged."""
        state, extra = read_checkpoint(path)
        expected = {name: tuple(p.shape) for name, p in self._parameters}
        got = {name: tuple(value.shape) for name, value in state.parameters.items()}
        if expected != got:
            odd = sorted(set(expected.items()) ^ set(got.items()))[0]
            raise TrainingError(
                f"the checkpoint {path} is of another model: {odd[0]} {odd[1]} is only in one of them", hint="was model.path changed?"
            )
        if (digest := _digest(state.parameters.items())) != state.digest:
            raise TrainingError(
                f"expected parameters with digest {state.digest} in {path}, got {digest}",
                hint="its files were changed; take an older checkpoint",
            )
        self._settle()
        with torch.no_grad():
            for name, p in self._parameters:
                p.copy_(state.parameters[name])
        self._optimizer.restore(state.optimizer)
        self._stage = state.stage
        torch.set_rng_state(state.random["cpu"])
        if "cuda" in state.random and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(state.random["cuda"], self._policy.device)
        return extra

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face directory (weights, configuration, tokenizer) at `path`, whole or not at all."""

        def write(directory: Path) -> None:
            self._policy.module.save_pretrained(directory)
            for source in sorted(self._model_dir.iterdir()):
                target = directory / source.name
                if source.is_file() and not target.exists() and not source.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copyfile(source, target)

        write_directory(path, write)

    def _logprobs(self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices) -> npt.NDArray[np.float32]:
        """Log-probs [T] of the `wanted` tokens of `samples` under the current parameters, 0 elsewhere."""
        own = split_ranks(batch, samples, self._parallel.ranks, width=self._policy.width)[self._parallel.rank]
        found = torch.zeros(batch.num_tokens)
        with torch.no_grad(), _reproducible(self._deterministic):
            for micro in self._micro_batches(batch, wanted, own):
                found[torch.from_numpy(micro.target)] = self._policy.predict(micro, batch)[0].float().cpu()
        return self._parallel.sum(found).numpy()

    def _settle(self) -> None:
        """Before the parameters are written: let a snapshot of them be complete."""
        if self._snapshots is not None:
            self._snapshots.settle()

    def _micro_batches(self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices) -> list[MicroBatch]:
        return plan_micro_batches(
            batch,
            wanted,
            samples,
            budget=self._config.micro_tokens,
            share_prefixes=self._policy.free_masks,
            several_per_row=self._policy.free_masks,
            width=self._policy.width,
        )

    def _accumulate(
        self,
        batch: TrainBatch,
        objective: Objective,
        index: int,
        old_logprobs: npt.NDArray[np.float32] | None,
        logprobs: npt.NDArray[np.float64],
    ) -> dict[str, float]:
        """Add up the gradients of one optimizer step; fills `logprobs` [T] where tokens are trained; returns the metrics' sums."""
        samples = objective.steps[index]
        own = split_ranks(batch, samples, self._parallel.ranks, width=self._policy.width)[self._parallel.rank]
        nothing = torch.zeros(0)
        names = list(self._terms(batch, objective, np.zeros(0, np.int64), nothing, nothing, old_logprobs)[1])
        sums = torch.zeros(len(names), dtype=torch.float64)
        for micro in self._micro_batches(batch, objective.weights[index] > 0, own):
            predicted, entropy = self._policy.predict(micro, batch)
            loss, terms = self._terms(batch, objective, micro.target, predicted, entropy, old_logprobs)
            weights = torch.from_numpy(objective.weights[index][micro.target]).to(loss.device)
            (loss * weights.to(loss.dtype)).sum().backward()
            self._optimizer.collect()
            sums += (torch.stack([terms[name].double() for name in names]) @ weights).cpu()
            logprobs[micro.target] = predicted.detach().double().cpu().numpy()
        return dict(zip(names, self._parallel.sum(sums).tolist(), strict=True))

    def _terms(
        self,
        batch: TrainBatch,
        objective: Objective,
        target: Indices,
        logprobs: Tensor,
        entropy: Tensor,
        old_logprobs: npt.NDArray[np.float32] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-token loss and metrics of the tokens `target`, all [M]."""
        if batch.kind == "sft":
            loss, terms = losses.sft(logprobs)
        else:
            old = logprobs.detach() if old_logprobs is None else _like(logprobs, old_logprobs[target])
            loss, terms = losses.policy_gradient(
                logprobs,
                old,
                _like(logprobs, batch.sampler_logprobs[target]),
                _like(logprobs, objective.advantages[target]),
                clip_low=self._loss.clip_low,
                clip_high=self._loss.clip_high,
                tis_cap=self._loss.tis_cap,
                tis_floor=self._loss.tis_floor,
            )
        return loss, {"train/loss": loss.detach(), **terms, "train/entropy_loss": entropy}


def host_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """[nbytes] uint8 of a tensor's elements in C order; shares memory with it where it lies on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    return combine({name: tensor_digest(host_bytes(p), p.element_size()) for name, p in parameters})


def _like(reference: Tensor, values: npt.NDArray[np.floating]) -> Tensor:
    return torch.as_tensor(values, dtype=reference.dtype, device=reference.device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


@contextmanager
def _reproducible(enabled: bool) -> Generator[None]:
    """Reproducible kernels only, for as long as it lasts: the switch belongs to the process, and others run in it too."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    memory.fill_uninitialized_memory = False  # costs a pass over every new tensor and changes no result here
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled
