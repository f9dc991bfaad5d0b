"""What a trainer is given: packed token sequences as numpy arrays. Letters: `T` tokens of the batch, `N` samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import TrainingError
from streamrl.schemas.candidates import CandidateSets, bounds_of
from streamrl.schemas.ledger import Choices, SourceTally
from streamrl.schemas.samples import Status
from streamrl.schemas.versions import Version

STATUS_CODES = {status.value: code for code, status in enumerate(Status)}
"""What stands for a status in `TrainBatch.status`: 0 completed, 1 truncated, 2 aborted, 3 failed."""


class LogitBiases(msgspec.Struct, frozen=True, kw_only=True):
    """Few different biases over many tokens. Bias k changes the logits of `ids[bounds[k] : bounds[k + 1]]`."""

    of: npt.NDArray[np.int32]
    """[T]; which of the biases the token was drawn with, -1: none."""
    bounds: npt.NDArray[np.int64]
    """[K + 1]"""
    ids: npt.NDArray[np.int32]
    """Token ids, rising within a bias."""
    values: npt.NDArray[np.float32]
    """What is added to their logits."""

    @classmethod
    def from_tables(cls, of: npt.NDArray[np.int32], biases: Sequence[Mapping[int, float]]) -> LogitBiases | None:
        """Of tables by token id; None where no token has one."""
        if not (of >= 0).any():
            return None
        rows = [sorted(bias.items()) for bias in biases]
        bounds = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        ids, values = np.array([pair for row in rows for pair in row], np.float64).reshape(-1, 2).T
        return cls(of=of, bounds=bounds, ids=ids.astype(np.int32), values=values.astype(np.float32))

    def tables(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Ids and values of each bias."""
        for start, end in itertools.pairwise(self.bounds.tolist()):
            yield self.ids[start:end].astype(np.int64), self.values[start:end]


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, packed: sample n's tokens are `tokens[offsets[n] : offsets[n + 1]]`. Sorted by task, rollout, sample."""

    kind: Literal["sft", "rl"]
    """Which loss: demonstrations, or policy gradient."""
    version: Version
    """The version trained from."""
    stage_step: int
    """Batches of this kind trained before this one (drives the learning-rate schedule)."""
    tokens: npt.NDArray[np.int32]
    """[T]"""
    offsets: npt.NDArray[np.int64]
    """[N + 1], offsets[0] = 0, offsets[N] = T"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]; True where the token is trained on; never at a sequence's first token."""
    sampler_logprobs: npt.NDArray[np.float32]
    """[T]; 0.0 where no model sampled the token."""
    staleness: npt.NDArray[np.int32]
    """[T]; version trained from minus version that sampled the token; 0 where no model did."""
    temperature: npt.NDArray[np.float32]
    """[T]; the logits that give the token are divided by it before the log-softmax (1.0 for demonstrations)."""
    top_p: npt.NDArray[np.float32]
    """[T]; 1.0 = off."""
    top_k: npt.NDArray[np.int32]
    """[T]; -1 = off."""
    rewards: npt.NDArray[np.float64]
    """[N] that each sample is trained on: its rollout's, or its agent's own. NaN where there is none."""
    tasks: npt.NDArray[np.int64]
    """[N]; the group's id. Samples of one group are neighbours."""
    rollouts: npt.NDArray[np.int64]
    """[N]; index of the rollout within its group. Samples of one rollout share its reward, which counts once, but for those of `agents`."""
    status: npt.NDArray[np.int8]
    """[N]; how the sample ended, as `STATUS_CODES` has it."""
    penalties: npt.NDArray[np.float64] | None = None
    """[N]; what `rewards` have of the penalty on long answers, at most 0 and equal where rewards are; None: there is none."""
    length_rewards: npt.NDArray[np.float64] | None = None
    """[N]; what `rewards` have of the reward on length, equal where rewards are; None: there is none."""
    baselines: npt.NDArray[np.float64] | None = None
    """[N]; the reward of the task's greedy answer, which is no sample of the batch, with what length adds to it; of an agent's sample the
    mean reward of the greedy rollout's agents of its role. None: there are no greedy answers."""
    reward_parts: dict[str, npt.NDArray[np.float64]] = {}
    """[N] each; the parts of the rewards: those that `loss.objectives` names, and the first of others. NaN where a sample has none."""
    min_p: npt.NDArray[np.float32] | None = None
    """[T]; 0.0 = off; None: off everywhere."""
    logit_biases: LogitBiases | None = None
    """What was added to logits before the temperature; None: nothing."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[T, layers, k]; experts that each layer of the sampler sent the token to, -1 where that is not known. The policy's go there too,
    whatever its routers choose (R3, arXiv 2510.11370); None: they choose."""
    candidates: CandidateSets | None = None
    """Of each of the T tokens: where top-p, top-k or min-p cut what it was drawn from, all that was left, over which every model's
    probabilities are normalised, whatever its own would leave; elsewhere the sampler's likeliest. None: nothing is known."""
    agents: tuple[str, ...] = ()
    """[N]; the agent whose own reward a sample is trained on, empty where it is the rollout's; none at all where no sample has an agent."""
    engines: tuple[str, ...] = ()
    """[N]; the engine that sampled each, the last one of several; none at all where that is not known."""
    sources: dict[str, SourceTally] = {}
    """Groups and rewards by `metadata.data_source`, where tasks have one."""
    micro_tokens: int = 0
    """Tokens of one forward and backward pass; 0: the trainer's own budget."""
    choices: Choices | None = None
    """How it was computed when it was trained before; None: as the trainer chooses."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if (values := getattr(self, name)) is not None and len(values) != len(self.tokens):
                raise TrainingError(
                    f"expected {name} of each of {len(self.tokens)} tokens, got {len(values)} values",
                    hint="repeat the samples' values over their tokens",
                    field=name,
                )
        if self.candidates is not None and self.candidates.num_tokens != len(self.tokens):
            raise TrainingError(
                f"expected candidates of each of {len(self.tokens)} tokens, got those of {self.candidates.num_tokens}", field="candidates"
            )
        for name in ("agents", "engines"):
            if len(getattr(self, name)) not in (0, self.num_samples):
                raise TrainingError(
                    f"expected {name} of each of {self.num_samples} samples, or none, got {len(getattr(self, name))}", field=name
                )

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        rewards: Sequence[float] | None = None,
        sampler_logprobs: Sequence[Sequence[float]] | None = None,
        loss_mask: Sequence[Sequence[bool]] | None = None,
        staleness: Sequence[Sequence[int]] | None = None,
        tasks: Sequence[int] | None = None,
        rollouts: Sequence[int] | None = None,
        agents: Sequence[str] = (),
        baselines: Sequence[float] | None = None,
        status: Status | Sequence[Status] = Status.COMPLETED,
        temperature: float | Sequence[float] = 1.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = -1,
        min_p: float | Sequence[float] = 0.0,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
        routed_experts: Sequence[npt.ArrayLike] | None = None,
        candidates: Sequence[Sequence[Mapping[int, float]]] | None = None,
        kind: Literal["sft", "rl"] = "rl",
        version: Version | None = None,
        stage_step: int = 0,
    ) -> TrainBatch:
        """A batch of N samples from lists, for use as a library and in tests; the stream's batches come from `streamrl.core.assembly`.

        Args:
            prompts: token ids of each sample's prompt, which is not trained.
            answers: token ids of each sample's answer.
            rewards: [N]; None: there are none (NaN).
            sampler_logprobs: of each answer's tokens; None: 0.0, as of tokens that no model sampled.
            loss_mask: which of each answer's tokens are trained; None: all.
            staleness: of each answer's tokens; None: 0.
            tasks: [N] the group's id, samples of one group side by side; None: each sample is its own group.
            rollouts: [N] index within the group; None: samples of a group are numbered from 0, each a rollout of its own.
            agents: [N] see the field.
            baselines: [N] see the field.
            status: of all samples, or [N].
            temperature: of all samples, or [N]; all tokens of a sample have the same.
            top_p: of all samples, or [N].
            top_k: of all samples, or [N].
            min_p: of all samples, or [N].
            logit_bias: by token id, of all samples, or [N] of such; None: nothing.
            routed_experts: for each sample [tokens, layers, k], prompt included; None: the policy's routers choose.
            candidates: for each of each answer's tokens, log-probs by token id; none of a token of which nothing is known.
            kind: see the field.
            version: the version trained from; None: the first.
            stage_step: see the field.

        Raises:
            TrainingError: lists of different lengths, or a group that is not in one piece.

        Example:
            >>> batch = TrainBatch.from_lists([[5, 6]] * 2, [[7, 8], [9]], rewards=[1.0, 0.0], tasks=[0, 0])
            >>> batch.tokens.tolist(), batch.offsets.tolist(), batch.loss_mask.tolist()
            ([5, 6, 7, 8, 5, 6, 9], [0, 4, 7], [False, False, True, True, False, False, True])
        """
        _same("prompts", [len(prompts)], [len(answers)])
        shape = _Shape([len(prompt) for prompt in prompts], [len(answer) for answer in answers])
        of_task = shape.of_samples(range(len(answers)) if tasks is None else tasks, "tasks", np.int64)
        begins = _groups(of_task)
        if rollouts is None:
            rollouts = (np.arange(len(of_task)) - begins).tolist()
        ids = [np.array([*prompt, *answer], np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
        experts = None
        if routed_experts is not None:
            experts = np.concatenate([np.asarray(one, np.int16) for one in routed_experts])
            _same("routed_experts", [len(np.asarray(one)) for one in routed_experts], shape.lengths)
        return cls(
            kind=kind,
            routed_experts=experts,
            candidates=shape.sets(candidates, answers),
            version=version or Version(),
            stage_step=stage_step,
            tokens=np.concatenate([np.zeros(0, np.int32), *ids]),
            offsets=np.cumsum([0, *shape.lengths]).astype(np.int64),
            loss_mask=shape.of_tokens(loss_mask, "loss_mask", True, np.bool_),
            sampler_logprobs=shape.of_tokens(sampler_logprobs, "sampler_logprobs", 0.0, np.float32),
            staleness=shape.of_tokens(staleness, "staleness", 0, np.int32),
            temperature=np.repeat(shape.of_samples(temperature, "temperature", np.float32), shape.lengths),
            top_p=np.repeat(shape.of_samples(top_p, "top_p", np.float32), shape.lengths),
            top_k=np.repeat(shape.of_samples(top_k, "top_k", np.int32), shape.lengths),
            min_p=np.repeat(shape.of_samples(min_p, "min_p", np.float32), shape.lengths) if np.any(min_p) else None,
            logit_biases=shape.biases(logit_bias),
            rewards=shape.of_samples(np.nan if rewards is None else rewards, "rewards", np.float64),
            tasks=of_task,
            rollouts=shape.of_samples(rollouts, "rollouts", np.int64),
            agents=tuple(agents),
            baselines=None if baselines is None else shape.of_samples(baselines, "baselines", np.float64),
            status=shape.of_samples(
                STATUS_CODES[status] if isinstance(status, str) else [STATUS_CODES[s] for s in status], "status", np.int8
            ),
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] tokens of each sample."""
        return np.diff(self.offsets)


class _Shape(msgspec.Struct, frozen=True):
    """How many tokens the prompts and the answers of a batch have; makes arrays of lists that fit."""

    prompts: list[int]
    answers: list[int]

    @property
    def lengths(self) -> list[int]:
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def of_tokens(self, values: Sequence[Sequence[Any]] | None, name: str, default: Any, dtype: Any) -> npt.NDArray[Any]:
        """[T] of what the answers' tokens have; 0, or False, at the prompts'."""
        values = [[default] * number for number in self.answers] if values is None else values
        _same(name, [len(row) for row in values], self.answers)
        outside = False if dtype is np.bool_ else 0
        rows = [np.array([*([outside] * number), *row], dtype) for number, row in zip(self.prompts, values, strict=True)]
        return np.concatenate([np.zeros(0, dtype), *rows])

    def sets(self, given: Sequence[Sequence[Mapping[int, float]]] | None, answers: Sequence[Sequence[int]]) -> CandidateSets | None:
        """Of all tokens; None where none is said."""
        if given is None:
            return None
        _same("candidates", [len(row) for row in given], self.answers)
        for row, ids in zip(given, answers, strict=True):
            if any(one and token not in one for one, token in zip(row, ids, strict=True)):
                raise TrainingError("expected each token of an answer among its own candidates", field="candidates")
        nothing: Mapping[int, float] = {}
        rows = [one for prompt, row in zip(self.prompts, given, strict=True) for one in (*[nothing] * prompt, *row)]
        ids, logprobs = np.array([pair for row in rows for pair in sorted(row.items())], np.float64).reshape(-1, 2).T
        return CandidateSets(bounds_of(np.array([len(row) for row in rows])), ids.astype(np.int32), logprobs.astype(np.float32))

    def biases(self, given: Mapping[int, float] | Sequence[Mapping[int, float]] | None) -> LogitBiases | None:
        """Of all samples, or of each of them."""
        if given is None:
            return None
        tables = [given] * len(self.answers) if isinstance(given, Mapping) else list(given)
        _same("logit_bias", [len(tables)], [len(self.answers)])
        places = np.where([len(table) > 0 for table in tables], np.arange(len(tables)), -1)
        return LogitBiases.from_tables(np.repeat(places, self.lengths).astype(np.int32), tables)

    def of_samples(self, values: Any, name: str, dtype: Any) -> npt.NDArray[Any]:
        """[N]; a single value is that of all."""
        found = np.asarray(values, dtype)
        found = np.full(len(self.answers), found) if found.ndim == 0 else found
        _same(name, [len(found)], [len(self.answers)])
        return found


def _groups(of_task: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] the first sample of each sample's group; raises TrainingError where one is not in one piece."""
    _, begins, count = np.unique(of_task, return_index=True, return_counts=True)
    if (np.diff(of_task) != 0).sum() >= max(1, len(begins)):
        raise TrainingError(
            f"expected samples of one task side by side, got tasks {of_task.tolist()[:16]}", hint="sort the samples", field="tasks"
        )
    return np.repeat(np.sort(begins), count[np.argsort(begins)])


def _same(name: str, got: list[int], expected: list[int]) -> None:
    if got != expected:
        raise TrainingError(
            f"expected {name} of the answers' lengths {expected[:16]}, got {got[:16]}", hint="one entry for each", field=name
        )


def uncut(batch: TrainBatch) -> TrainBatch:
    """The batch as if top-p, top-k and min-p were off; where they are, itself."""
    if batch.min_p is None and (batch.top_p >= 1).all() and (batch.top_k < 1).all():
        return batch
    whole = {"top_p": np.ones_like(batch.top_p), "top_k": np.full_like(batch.top_k, -1), "min_p": None}
    return msgspec.structs.replace(batch, candidates=None, **whole)


def sample_of_token(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """[T] index of the sample that each packed token belongs to."""
    return np.repeat(np.arange(batch.num_samples, dtype=np.int64), batch.lengths)


def samples_at(batch: TrainBatch, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[M] index of the sample that each of the packed tokens `tokens` [M] belongs to: `sample_of_token(batch)[tokens]`, in O(M log N)."""
    return np.searchsorted(batch.offsets, tokens, side="right") - 1
