"""The `table` trainer: exact gradients of a tabular policy in numpy, for problems of a few tokens and for testing everything else.

Letters: `P` response positions, `V` vocabulary, `M` trained tokens. The policy is `logits` float32 [P, V, V]: next-token
logits given the position in the response (the last entry serves all later ones) and the previous token.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.algorithms.batch_metrics import ratio_metrics, step_means, weight_metrics
from streamrl.algorithms.estimators import needed_scores
from streamrl.algorithms.objective import (
    SOME,
    Objective,
    Scores,
    answer_probability,
    check_batch,
    judge_gradient,
    logprob_differences,
    make_objective,
)
from streamrl.algorithms.step_size import rollout_ess, scaled_rate
from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig, OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.core.candidates import candidate_metrics
from streamrl.core.packing import Indices
from streamrl.errors import ConfigError, TrainingError
from streamrl.models.directories import BackgroundWriter, check_files, damaged, recover, unreadable, write_directory
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.protocol import StepResult, TokenValues, not_finite
from streamrl.trainers.table import losses as table_losses
from streamrl.weights.protocol import Shard

Table = npt.NDArray[np.float32]
TABLE_FILE = "table.json"
LOGITS_FILE = "logits.npy"


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `table.json`."""

    vocab: int
    max_position: int
    eos: int


class TableTrainer:
    """Implements `streamrl.trainers.protocol.Trainer` without torch. Not thread-safe: one thread calls it.

    Arithmetic is float64 on float32 parameters and moments, so results do not depend on micro-batches (there are none).
    The moments begin anew whenever the kind of batch changes.

    Args:
        model_dir: holds `table.json` and, where training goes on from an export, `logits.npy`.
        trainer: this backend's section; one rank only.
        loss: the objective.
        learning_rate: the rate of a batch's optimizer steps.

    Raises:
        ConfigError: `model_dir` holds no table.
        TrainingError: more than one rank is asked for.
    """

    def __init__(self, model_dir: Path, *, trainer: TrainerConfig, loss: LossConfig, learning_rate: Callable[[TrainBatch], float]) -> None:
        if trainer.ranks != 1:
            raise TrainingError(
                f"the table backend has one rank, trainer.ranks is {trainer.ranks}",
                hint="set trainer.ranks = 1",
                key="trainer.ranks",
                got=trainer.ranks,
            )
        self._model_dir = model_dir
        self._minibatches = trainer.minibatches
        self._replays = trainer.support_replay
        self._loss = loss
        self._optimizer = trainer.optimizer
        self._compares = trainer.gradient_cosine
        self._last: tuple[str, npt.NDArray[np.float64]] | None = None
        self._learning_rate = learning_rate
        self._logits = _initial_logits(model_dir)
        self._adam = Adam(self._logits, trainer.optimizer)
        self._stage = ""
        self._writer = BackgroundWriter()

    def step(self, batch: TrainBatch) -> StepResult:
        """See `Trainer.step`. Metrics are means over the batch's optimizer steps, weighted as the loss is."""
        trained = np.flatnonzero(batch.loss_mask)
        check_batch(batch)
        old_logprobs = np.zeros(batch.num_tokens)
        logp_MV, old_logprobs[trained] = self._forward(batch, trained)
        energy = None
        if Role.ENERGY in needed_scores(self._loss):
            energy = np.zeros(batch.num_tokens)
            squares_M = 1.0 - 2.0 * np.exp(old_logprobs[trained]) + np.square(np.exp(logp_MV)).sum(-1)
            energy[trained] = np.maximum(squares_M, 0.0) / np.square(batch.temperature[trained].astype(np.float64))
        objective = make_objective(batch, self._loss, self._minibatches, Scores(proximal=old_logprobs, energy=energy))
        if batch.kind != self._stage:
            self._adam.reset()
            self._stage = batch.kind
        rate = self._learning_rate(batch)
        logprobs, used = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
        rows: list[dict[str, float]] = []
        finite = True
        for index in range(len(objective.steps)):
            gradient, sums = self._gradient(batch, objective, index, logprobs, used)
            samples, step_rate = objective.steps[index], rate
            if batch.kind == "rl" and self._optimizer.ess_scaling != "off":
                sums["train/ess_rollout"] = rollout_ess(batch, logprobs, samples)
                step_rate = scaled_rate(rate, sums["train/ess_rollout"], self._optimizer)
            if (cosine := self._turned(batch.kind, gradient)) is not None:
                sums["train/grad_cosine"] = cosine
            norm, applied = self._adam.step(gradient, step_rate)
            finite = finite and applied
            rows.append({**sums, "train/grad_norm": norm, "train/lr": step_rate, "train/global_batch_size": float(len(samples))})
        metrics = step_means(rows)
        score = answer_probability(batch, logprobs) if batch.kind == "sft" else None
        if score is not None:
            metrics["train/answer_probability"] = score
        else:
            dropped = sum(row["train/nonfinite_tokens"] for row in rows)
            finite = finite and (dropped == 0 or dropped < len(trained))
            metrics["train/nonfinite_tokens"] = float(dropped)
            metrics |= candidate_metrics(batch, support=self._replays, likeliest=False)
            metrics |= ratio_metrics(batch, old_logprobs) | weight_metrics(batch, used) | logprob_differences(batch, old_logprobs)
        tokens = None if batch.kind == "sft" else TokenValues(logprobs, used, objective.advantages)
        learns = finite and batch.kind == "rl"
        gradient, fault = judge_gradient(batch, objective, self._loss, [row["train/grad_norm"] for row in rows]) if learns else (SOME, "")
        return StepResult(
            digest=self.digest(),
            metrics={**objective.metrics, **metrics},
            finite=finite,
            gradient=gradient,
            fault=fault,
            score=score,
            tokens=tokens,
        )

    def digest(self) -> str:
        """See `Trainer.digest`."""
        return _digest(self._logits)

    def shards(self) -> Iterator[Shard]:
        """See `Trainer.shards`: one, named `logits`, copied before this returns."""
        shape = self._logits.shape
        data = self._logits.copy().reshape(-1).view(np.uint8)
        return iter([Shard(name="logits", dtype="float32", global_shape=shape, data=data, shape=shape)])

    def save(self, path: Path, extra: bytes, *, version: Version, beside: Mapping[str, bytes] | None = None) -> Future[None]:
        """See `Trainer.save`: one file `state.npz`."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            logits=self._logits,
            mean=self._adam.mean,
            square=self._adam.square,
            updates=np.int64(self._adam.updates),
            stage=np.str_(self._stage),
            version=np.str_(version),
            digest=np.str_(self.digest()),
            extra=np.frombuffer(extra, np.uint8),
        )

        def write(directory: Path) -> None:
            (directory / "state.npz").write_bytes(buffer.getbuffer())

        return self._writer.submit(path, write, beside)

    def load(self, path: Path) -> bytes:
        """See `Trainer.load`."""
        recover(path)
        check_files(path)
        try:
            with (path / "state.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                state = {name: arrays[name] for name in ("logits", "mean", "square", "updates", "stage", "digest", "extra")}
        except OSError as error:
            raise unreadable(path, error) from error
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise damaged(path, str(error)) from error
        logits, digest = state["logits"], str(state["digest"])
        if logits.shape != self._logits.shape:
            raise TrainingError(f"expected a table of shape {self._logits.shape} in {path}, got {logits.shape}")
        if _digest(logits) != digest:
            raise damaged(path, f"expected parameters with digest {digest}, got {_digest(logits)}")
        self._logits[...], self._adam.mean[...], self._adam.square[...] = logits, state["mean"], state["square"]
        self._adam.updates = int(state["updates"])
        self._stage = str(state["stage"])
        return state["extra"].tobytes()

    def export(self, path: Path) -> None:
        """See `Trainer.export`: a table's model directory with the trained logits."""

        def write(directory: Path) -> None:
            for source in sorted(self._model_dir.iterdir()):
                if source.is_file() and source.name != LOGITS_FILE:
                    shutil.copyfile(source, directory / source.name)
            np.save(directory / LOGITS_FILE, self._logits, allow_pickle=False)

        write_directory(path, write)

    def _forward(self, batch: TrainBatch, target: Indices) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Log-probs of every next token [M, V] and of the one at `target` [M], as the sampler's distribution has them."""
        position = np.minimum(response_positions(batch)[target], len(self._logits) - 1)
        logits = self._logits[position, batch.tokens[target - 1]].astype(np.float64)
        if (biases := batch.logit_biases) is not None:
            for index, (ids, values) in enumerate(biases.tables()):
                logits[np.ix_(np.flatnonzero(biases.of[target] == index), ids)] += values
        logp = _log_softmax(logits / batch.temperature[target, None].astype(np.float64))
        tokens, (top_p, top_k) = batch.tokens[target], (batch.top_p[target], batch.top_k[target])
        min_p = np.zeros(len(target), np.float32) if batch.min_p is None else batch.min_p[target]
        restricted = np.flatnonzero((top_p < 1) | (top_k > 0) | (min_p > 0))
        if len(restricted):
            bounds = (top_p[restricted], top_k[restricted], min_p[restricted])
            kept = _support(np.exp(logp[restricted]), tokens[restricted], *bounds)
            if batch.candidates is not None:
                sets = batch.candidates.at(target[restricted])
                said = np.repeat(np.arange(len(restricted)), sets.counts)
                kept[said] = False
                kept[said, sets.ids] = True
            logp[restricted] = _log_softmax(np.where(kept, logp[restricted], -np.inf))
        return logp, logp[np.arange(len(target)), tokens]

    def _gradient(
        self,
        batch: TrainBatch,
        objective: Objective,
        index: int,
        logprobs: npt.NDArray[np.float64],
        used: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
        """Gradient [P, V, V] of one optimizer step and its metrics; fills `logprobs` [T] and the correction's weights `used` [T]."""
        weights_T = objective.weights[index]
        target = np.flatnonzero(weights_T > 0)
        logp_MV, chosen = self._forward(batch, target)
        logprobs[target] = chosen
        dropped = np.zeros(len(target), np.bool_)
        if batch.kind == "sft":
            loss, slope, terms = table_losses.sft(chosen)
        else:
            mu = batch.sampler_logprobs[target].astype(np.float64)
            proximal = self._proximal(objective, target, chosen, mu)
            advantages = objective.advantages[target]
            dropped = ~(objective.finite[target] & np.isfinite(chosen) & np.isfinite(mu) & np.isfinite(proximal))
            safe, proximal, mu, advantages = (np.where(dropped, 0.0, values) for values in (chosen, proximal, mu, advantages))
            loss, slope, used[target], terms = table_losses.policy_gradient(safe, proximal, mu, advantages, self._loss)
            loss, slope, used[target] = (np.where(dropped, 0.0, values) for values in (loss, slope, used[target]))
            terms = {name: np.where(dropped, 0.0, values) for name, values in terms.items()}
        probs_MV = np.where(dropped[:, None], 0.0, np.exp(logp_MV))
        entropy = -(probs_MV * np.where(probs_MV > 0, logp_MV, 0.0)).sum(-1)
        weights = weights_T[target]
        # d log pi / d logits = (onehot - probs) / temperature; tokens outside a restricted support have probability 0.
        scale = (weights * slope / batch.temperature[target])[:, None]
        rows_MV = -scale * probs_MV
        rows_MV[np.arange(len(target)), batch.tokens[target]] += scale[:, 0]
        positions, vocabulary, _ = self._logits.shape
        context = np.minimum(response_positions(batch)[target], positions - 1) * vocabulary + batch.tokens[target - 1]
        gradient = np.zeros((positions * vocabulary, vocabulary))
        np.add.at(gradient, context, rows_MV)
        sums = {name: float(weights @ value) for name, value in {"train/loss": loss, **terms, "train/entropy_loss": entropy}.items()}
        if batch.kind == "rl":
            sums["train/nonfinite_tokens"] = float(dropped.sum())
        return gradient.reshape(self._logits.shape), sums

    def _turned(self, kind: str, gradient: npt.NDArray[np.float64]) -> float | None:
        """The cosine between this gradient and that of the optimizer step before; None: there is none of this kind, or one of them is 0."""
        if not self._compares:
            return None
        last, self._last = self._last, (kind, gradient)
        if last is None or last[0] != kind:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = float((gradient * last[1]).sum() / np.sqrt((gradient**2).sum() * (last[1] ** 2).sum()))
        return max(-1.0, min(1.0, cosine)) if np.isfinite(cosine) else None

    def _proximal(
        self, objective: Objective, target: Indices, current: npt.NDArray[np.float64], sampler: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Log-probs [M] of the policy that ratios are taken against."""
        if self._loss.correction.ratio == "current":
            return current
        if self._loss.proximal == "sampler":
            return sampler
        assert objective.scores.proximal is not None
        return objective.scores.proximal[target].astype(np.float64)


class Adam:
    """Adam with decoupled weight decay and a global-norm clip on one float32 array, which is updated in place."""

    def __init__(self, parameters: Table, config: OptimizerConfig) -> None:
        self._parameters = parameters
        self._config = config
        self.mean = np.zeros_like(parameters)
        self.square = np.zeros_like(parameters)
        self.updates = 0

    def reset(self) -> None:
        """Forget the moments."""
        self.mean[...] = 0
        self.square[...] = 0
        self.updates = 0

    def step(self, gradient: npt.NDArray[np.float64], learning_rate: float) -> tuple[float, bool]:
        """One update; returns the norm before clipping, and False when it was not finite and nothing was changed.

        Raises:
            WeightsDiverged: the update made a parameter that is not finite.
        """
        c = self._config
        norm = float(np.sqrt(np.sum(gradient**2)))
        if not np.isfinite(norm):
            return norm, False
        if 0 < c.clip_norm < norm:
            gradient = gradient * (c.clip_norm / norm)
        self.updates += 1
        self.mean[...] = c.beta1 * self.mean.astype(np.float64) + (1 - c.beta1) * gradient
        self.square[...] = c.beta2 * self.square.astype(np.float64) + (1 - c.beta2) * gradient**2
        mean = self.mean.astype(np.float64) / (1 - c.beta1**self.updates)
        root = np.sqrt(self.square.astype(np.float64) / (1 - c.beta2**self.updates))
        decayed = self._parameters.astype(np.float64) * (1 - learning_rate * c.weight_decay)
        with np.errstate(over="ignore"):
            self._parameters[...] = decayed - learning_rate * mean / (root + c.eps)
        if not np.isfinite(self._parameters).all():
            raise not_finite(norm, learning_rate)
        return norm, True


def response_positions(batch: TrainBatch) -> Indices:
    """[T] how many tokens of the same response precede each token; 0 outside responses.

    A response is a run of tokens that a model sampled or that are trained on (a demonstration). A token masked for its age
    still has its staleness and its log-prob, and so still counts.
    """
    inside = batch.loss_mask | (batch.sampler_logprobs != 0) | (batch.staleness != 0)
    index = np.arange(batch.num_tokens, dtype=np.int64)
    starts_anew = ~inside
    starts_anew[batch.offsets[:-1]] = True
    # A run begins one after the last token outside it; a sample's first token is never sampled.
    last_outside = np.maximum.accumulate(np.where(starts_anew, index, 0))
    return np.where(starts_anew, 0, index - last_outside - 1)


def _initial_logits(model_dir: Path) -> Table:
    path = model_dir / TABLE_FILE
    try:
        shape = msgspec.json.decode(path.read_bytes(), type=TableFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"expected vocab, max_position and eos in {path}: {error}", hint="is this the model directory of a table run?", path=str(path)
        ) from error
    logits = np.zeros((shape.max_position, shape.vocab, shape.vocab), np.float32)
    if (model_dir / LOGITS_FILE).is_file():
        stored = np.load(model_dir / LOGITS_FILE, allow_pickle=False)
        if stored.shape != logits.shape:
            raise ConfigError(
                f"expected logits of shape {logits.shape} in {model_dir / LOGITS_FILE}, got {stored.shape}",
                expected=logits.shape,
                got=stored.shape,
            )
        logits[...] = stored
    return logits


def _digest(logits: Table) -> str:
    return combine({"logits": tensor_digest(logits.reshape(-1).view(np.uint8), 4)})


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _support(
    probs: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    min_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.bool_]:
    """[M, V] what top-k, top-p and min-p leave, by the rule of `streamrl.algorithms.nucleus.support`."""
    order = np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, -1)
    before = ranked.cumsum(-1) - ranked
    limit = np.where(top_k > 0, top_k, probs.shape[-1])[:, None]
    kept = (np.arange(probs.shape[-1]) < limit) & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    kept &= ranked >= min_p[:, None] * ranked[:, :1]
    mask = np.zeros_like(kept)
    np.put_along_axis(mask, order, kept, -1)
    mask[np.arange(len(tokens)), tokens] = True
    return mask
