"""From a closed batch and the decoded messages to the arrays a trainer is given. Pure; order never depends on arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import STATUS_CODES, LogitBiases, TrainBatch
from streamrl.core.fold import Batch
from streamrl.core.length_rewards import length_rewards
from streamrl.core.overlong import of_rollouts, overlong_penalty, sampled_tokens
from streamrl.core.state import FoldConfig, FoldState
from streamrl.errors import TrainingError
from streamrl.schemas.candidates import CandidateSets, joined
from streamrl.schemas.ledger import SourceTally, Used
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import LogprobMode, Status, role_of

_MOST_SOURCES = 64
MOST_PARTS = 8
"""Parts of rewards beside the objectives."""
"""Names of sources that an entry tells of."""


def used(batch: Batch) -> tuple[Used, ...]:
    """The ledger's list of what a batch consists of, in packing order."""
    groups = []
    for group in batch.groups:
        rollouts = tuple(sorted(group.rollouts))
        groups.append(Used(group.task, rollouts, tuple(group.rollouts[k].sequence for k in rollouts)))
    return tuple(groups)


def ages(batch: Batch, state: FoldState) -> dict[str, list[int]]:
    """Age in versions of each group's oldest token, whole and in parts: total = in_flight + queued + publish_lag.

    In flight: versions that passed between its oldest and its newest token. Publish lag: versions that were trained but not yet served
    when it arrived. Queued: versions trained between its arrival and this batch.
    """
    parts: dict[str, list[int]] = {"total": [], "in_flight": [], "publish_lag": [], "queued": []}
    now = state.version.number
    for group in batch.groups:
        sampled = [r for r in group.rollouts.values() if r.oldest >= 0]
        if not sampled:
            for values in parts.values():
                values.append(0)
            continue
        oldest = min(sampled, key=lambda r: r.oldest)
        parts["total"].append(now - oldest.oldest)
        parts["in_flight"].append(oldest.newest - oldest.oldest)
        parts["publish_lag"].append(oldest.arrived - oldest.newest)
        parts["queued"].append(now - oldest.arrived)
    return parts


PARTS = ("in_flight", "queued", "publish_lag")


def parts_of_ages(batch: Batch, arrays: TrainBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Age in versions of each trained token, and of each sample's oldest one, in the `PARTS`: [3, tokens], [3, samples].

    A token's age is the sum of its three parts. In flight: from its version to the newest one that its rollout was sampled with.
    Samples without a trained token are left out.

    Args:
        batch: of which arrays were made.
        arrays: what `assemble` gave.
    """
    pending = {group.task: group.rollouts for group in batch.groups}
    found = [pending[task][rollout] for task, rollout in zip(arrays.tasks.tolist(), arrays.rollouts.tolist(), strict=True)]
    now = arrays.version.number
    queued = np.array([now - one.arrived for one in found], np.int64)
    publish_lag = np.array([one.arrived - one.newest for one in found], np.int64)
    sample = np.repeat(np.arange(arrays.num_samples), np.diff(arrays.offsets))[arrays.loss_mask]
    ages = arrays.staleness[arrays.loss_mask].astype(np.int64)
    of_tokens = np.stack([ages - queued[sample] - publish_lag[sample], queued[sample], publish_lag[sample]])
    oldest = np.full(arrays.num_samples, -1, np.int64)
    np.maximum.at(oldest, sample, ages)
    rows = np.flatnonzero(oldest >= 0)
    of_samples = np.stack([oldest[rows] - queued[rows] - publish_lag[rows], queued[rows], publish_lag[rows]])
    return of_tokens, of_samples


def assemble(
    batch: Batch,
    messages: Mapping[int, SampleBatch],
    state: FoldState,
    config: FoldConfig,
    *,
    routed: Callable[[SampleBatch], npt.NDArray[np.int16]] | None = None,
    candidates: Callable[[SampleBatch], CandidateSets] | None = None,
) -> TrainBatch:
    """Pack a batch, sorted by task, rollout, sample. Of greedy rollouts (`RolloutTask.baseline`) it has the rewards alone.

    Args:
        batch: what `close` gave on `state`.
        messages: decoded messages by sequence; must hold all of `batch.sequences`.
        state: the state the batch was closed on (gives the version trained from).
        config: tokens are masked here that are older than max_staleness, of truncated samples, or of guessed versions, where
            `stale`, `overlong` or `inexact` is "mask", and of rollouts that a filter refuses where `filters.refused` is.
        routed: of a message, [T, layers, k] where its tokens went; None: that is not asked for.
        candidates: of a message's T tokens; None: they are not asked for.

    Raises:
        TrainingError: not one trainable token is left.
    """
    packed = _Packed(batch, messages)
    tokenwise, samplewise, offsets = packed.tokenwise, packed.samplewise, packed.offsets
    numbers = tokenwise(SampleBatch.token_versions)
    staleness = np.where(numbers >= 0, state.version.number - numbers, 0).astype(np.int32)
    loss_mask = tokenwise(lambda message: message.loss_mask).astype(bool)
    if config.stale == "mask":
        loss_mask &= staleness <= config.max_staleness
    status = samplewise(lambda message: np.array([STATUS_CODES[text] for text in message.texts("status")], np.int8))
    if config.overlong == "mask":
        loss_mask &= np.repeat(status != STATUS_CODES[Status.TRUNCATED], np.diff(offsets))
    if config.inexact == "mask":
        loss_mask &= ~tokenwise(_inexact)
    if config.filters.refused == "mask":
        loss_mask &= np.repeat(packed.trained, np.diff(offsets))
    if not loss_mask.any():
        raise TrainingError(
            f"expected a trainable token in the batch after version {state.version}, got none among {len(numbers)} tokens",
            version=str(state.version),
            tokens=len(numbers),
        )
    warmup = state.in_warmup(batch.groups[0].task)
    penalties, added = (None, None) if warmup else _by_length(packed, config)
    # A sampler that reports log-probs from before top-k, top-p and min-p is compared with the policy's from before them too.
    modes = samplewise(lambda message: np.array(message.texts("logprob_mode")))
    restricted = np.repeat(modes == LogprobMode.SAMPLED, np.diff(offsets))
    min_p = np.where(restricted, tokenwise(lambda message: message.drawn_at("min_p")), 0.0).astype(np.float32)
    return TrainBatch(
        kind="sft" if warmup else "rl",
        version=state.version,
        stage_step=state.warmup_steps if warmup else state.steps,
        tokens=tokenwise(lambda message: message.tokens),
        offsets=offsets,
        loss_mask=loss_mask,
        sampler_logprobs=tokenwise(lambda message: message.logprobs),
        staleness=staleness,
        temperature=np.ones(offsets[-1], np.float32) if warmup else tokenwise(lambda message: message.drawn_at("temperature")),
        top_p=np.where(restricted, tokenwise(lambda message: message.drawn_at("top_p")), 1.0).astype(np.float32),
        top_k=np.where(restricted, tokenwise(lambda message: message.drawn_at("top_k")), -1).astype(np.int32),
        min_p=min_p if min_p.any() else None,
        logit_biases=packed.biases(np.repeat(modes != LogprobMode.NONE, np.diff(offsets))),
        rewards=_total(packed, added, penalties),
        penalties=penalties,
        length_rewards=added,
        baselines=_baselines(packed, _Packed(batch, messages, baselines=True), config) if _has_baselines(batch) else None,
        reward_parts={}
        if warmup
        else {name: samplewise(partial(SampleBatch.reward_part, name=name)) for name in packed.parts(config.objectives)},
        routed_experts=tokenwise(routed) if routed is not None and packed.says("routed_experts") else None,
        candidates=packed.sets(candidates) if candidates is not None and packed.says("candidates") and not warmup else None,
        tasks=packed.tasks,
        rollouts=packed.rollouts,
        agents=packed.agents,
        status=status,
        engines=tuple(packed.samplewise(lambda message: np.array(message.texts("engine"))).tolist()),
        sources=by_source(batch, messages),
    )


def _by_length(packed: _Packed, config: FoldConfig) -> tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None]:
    """[N] the penalty on answers near their greatest length, and [N] the reward on length; None where there is none."""
    if not config.overlong_buffer and config.length.kind == "none":
        return None, None
    tasks, rollouts = packed.tasks, packed.rollouts
    lengths = packed.samplewise(sampled_tokens)
    longest = packed.samplewise(lambda message: message.ints("max_new_tokens")).astype(np.int64)
    penalties = added = None
    if config.length.kind != "none":
        added = length_rewards(config.length, packed.rewards, lengths, longest, tasks, rollouts, packed.agents)
    if config.overlong_buffer:
        limit = np.full_like(longest, config.overlong_length) if config.overlong_length else longest
        found = overlong_penalty(lengths, limit, buffer=config.overlong_buffer, penalty=config.overlong_penalty)
        penalties = of_rollouts(found, tasks, rollouts, packed.agents)
    return penalties, added


def _total(packed: _Packed, *added: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
    """[N] rewards with what is added to them."""
    return sum((one for one in added if one is not None), start=packed.rewards)


def _has_baselines(batch: Batch) -> bool:
    return any(group.baseline in group.rollouts for group in batch.groups)


def _baselines(packed: _Packed, greedy: _Packed, config: FoldConfig) -> npt.NDArray[np.float64]:
    """[N] for each sample the reward of its task's greedy rollout: of an agent's sample the mean of that rollout's agents of its role."""
    rewards = _total(greedy, *_by_length(greedy, config))
    # The samples that share a reward are one vote.
    votes = dict(zip(zip(greedy.tasks.tolist(), greedy.names, strict=True), rewards.tolist(), strict=True))
    found: dict[tuple[int, str], list[float]] = {}
    for (task, name), reward in votes.items():
        found.setdefault((task, role_of(name)), []).append(reward)
    keys = zip(packed.tasks.tolist(), packed.names, strict=True)
    return np.array([math.fsum(of := found[task, role_of(name)]) / len(of) for task, name in keys], np.float64)


def by_source(batch: Batch, messages: Mapping[int, SampleBatch]) -> dict[str, SourceTally]:
    """Groups and mean reward of each source that a batch has tasks of, by name; of very many the most frequent."""
    found: dict[str, list[list[float]]] = {}
    for group in batch.groups:
        if name := messages[next(iter(group.rollouts.values())).sequence].data_source():
            found.setdefault(name, []).append([one.reward for one in group.compared.values() if one.reward is not None])
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:_MOST_SOURCES]
    rewards = {name: [reward for group in found[name] for reward in group] for name in sorted(most)}
    return {name: SourceTally(len(found[name]), float(np.mean(given)) if given else None) for name, given in rewards.items()}


def _inexact(message: SampleBatch) -> npt.NDArray[np.bool_]:
    return np.zeros(len(message.tokens), np.bool_) if message.inexact is None else message.inexact


class _Packed:
    """Where every sample of a batch lies in its messages, in packing order; with `baselines` every one of a greedy rollout, and no other.

    A message is looked at once a column, not once a sample: that took a quarter of the time of a small model's step.
    """

    def __init__(self, batch: Batch, messages: Mapping[int, SampleBatch], *, baselines: bool = False) -> None:
        self._messages: list[SampleBatch] = []
        numbers: dict[int, int] = {}
        samples_before, tokens_before = [0], [0]
        rows: list[int] = []
        rewards: list[float] = []
        trained: list[bool] = []
        names: list[str] = []
        for group in batch.groups:
            of_message: dict[int, dict[int, list[int]]] = {}
            for rollout in sorted(group.rollouts):
                if (rollout == group.baseline) != baselines:
                    continue
                pending = group.rollouts[rollout]
                message = messages[pending.sequence]
                if message.task != group.task:
                    raise AssertionError(f"message {pending.sequence} holds task {message.task}, expected {group.task}")
                if pending.sequence not in numbers:
                    numbers[pending.sequence] = len(self._messages)
                    self._messages.append(message)
                    samples_before.append(samples_before[-1] + len(message.offsets) - 1)
                    tokens_before.append(tokens_before[-1] + int(message.offsets[-1]))
                if pending.sequence not in of_message:
                    of_message[pending.sequence] = _rows_by_rollout(message)
                found = of_message[pending.sequence].get(rollout, [])
                rows += [samples_before[numbers[pending.sequence]] + row for row in found]
                trained += [pending.num_tokens > 0] * len(found)
                agents, own = [""] * len(found), [np.nan if pending.reward is None else pending.reward] * len(found)
                for one in pending.agents:
                    for sample in one.samples:
                        agents[sample], own[sample] = one.agent, np.nan if one.reward is None else one.reward
                names += agents
                rewards += own
        self._rows = np.array(rows, np.int64)
        self.rewards = np.array(rewards, np.float64)
        self.trained = np.array(trained, np.bool_)
        """[N] whether the fold has left a token of the sample's rollout to be trained."""
        self.names = tuple(names)
        """[N] agents; empty texts where a sample has none."""
        self.agents = self.names if any(names) else ()
        starts = np.concatenate([message.offsets[:-1] + tokens for message, tokens in zip(self._messages, tokens_before, strict=False)])
        lengths = np.concatenate([np.diff(message.offsets) for message in self._messages])[self._rows]
        self.offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self._tokens = np.repeat(starts[self._rows] - self.offsets[:-1], lengths) + np.arange(self.offsets[-1])
        self.tasks = self.samplewise(lambda message: message.ints("task")).astype(np.int64)
        self.rollouts = self.samplewise(lambda message: message.ints("rollout")).astype(np.int64)

    def parts(self, objectives: Iterable[str]) -> list[str]:
        """Names of the parts of rewards that are wanted: the objectives, and at most `MOST_PARTS` of those that samples have."""
        found = frozenset[str]().union(*(message.reward_part_names() for message in self._messages))
        return list(dict.fromkeys((*objectives, *sorted(found)[:MOST_PARTS])))

    def tokenwise(self, column: Callable[[SampleBatch], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """[T] of a column that has a value for each token."""
        return np.concatenate([column(message) for message in self._messages])[self._tokens]

    def says(self, column: str) -> bool:
        """Whether a sample has something in an optional column."""
        return any(column in message.optional_names for message in self._messages)

    def sets(self, candidates: Callable[[SampleBatch], CandidateSets]) -> CandidateSets:
        """Of the T tokens."""
        return joined([candidates(message) for message in self._messages]).at(self._tokens)

    def biases(self, sampled: npt.NDArray[np.bool_]) -> LogitBiases | None:
        """Logit biases of the tokens that were `sampled` ([T]); None where there is none."""
        found = [message.logit_biases for message in self._messages]
        firsts = np.cumsum([0, *(len(biases) for _, biases in found)])
        if not firsts[-1]:
            return None
        of = np.concatenate([np.where(own >= 0, own + first, -1) for (own, _), first in zip(found, firsts, strict=False)])[self._tokens]
        biases = [bias for _, biases in found for bias in biases]
        # Messages of one run mostly have one bias: it is kept once.
        distinct = {tuple(sorted(bias.items())): index for index, bias in reversed(list(enumerate(biases)))}
        first = np.array([distinct[tuple(sorted(bias.items()))] for bias in biases], np.int32)
        kept, place = np.unique(first, return_inverse=True)
        of = np.where((of >= 0) & sampled, place[of], -1).astype(np.int32)
        return LogitBiases.from_tables(of, [biases[index] for index in kept.tolist()])

    def samplewise(self, column: Callable[[SampleBatch], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """[N] of a column that has a value for each sample."""
        return np.concatenate([column(message) for message in self._messages])[self._rows]


def _rows_by_rollout(message: SampleBatch) -> dict[int, list[int]]:
    """Rows of each rollout in a message, in the order of their sample numbers."""
    rollouts = message.rollouts
    rows: dict[int, list[int]] = {}
    for row in np.lexsort((message.ints("sample"), rollouts)).tolist():
        rows.setdefault(int(rollouts[row]), []).append(row)
    return rows
