"""From a closed batch and the decoded messages to the arrays a trainer is given. Pure; order never depends on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch
from streamrl.core.state import FoldConfig, FoldState, PendingRollout
from streamrl.errors import TrainingError
from streamrl.schemas.columns import SampleBatch
from streamrl.schemas.ledger import Used
from streamrl.schemas.samples import LogprobMode


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


def assemble(batch: Batch, messages: Mapping[int, SampleBatch], state: FoldState, config: FoldConfig) -> TrainBatch:
    """Pack a batch, sorted by task, rollout, sample.

    Args:
        batch: what `close` gave on `state`.
        messages: decoded messages by sequence; must hold all of `batch.sequences`.
        state: the state the batch was closed on (gives the version trained from).
        config: with `stale="mask"`, tokens older than max_staleness are masked here.

    Raises:
        TrainingError: not one trainable token is left.
    """
    rows = [row for group in batch.groups for row in _rows_of(group.task, group.rollouts, messages)]
    lengths = np.array([message.offsets[row + 1] - message.offsets[row] for message, row, _ in rows], np.int64)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    versions = {id(message): message.token_versions() for message, _, _ in rows}

    def tokenwise(column: str) -> npt.NDArray[Any]:
        parts = []
        for message, row, _ in rows:
            values = versions[id(message)] if column == "versions" else getattr(message, column)
            parts.append(values[message.offsets[row] : message.offsets[row + 1]])
        return np.concatenate(parts)

    def samplewise(column: str) -> npt.NDArray[Any]:
        return np.array([message.ints(column)[row] for message, row, _ in rows])

    numbers = tokenwise("versions")
    staleness = np.where(numbers >= 0, state.version.number - numbers, 0).astype(np.int32)
    loss_mask = tokenwise("loss_mask").astype(bool)
    if config.stale == "mask":
        loss_mask &= staleness <= config.max_staleness
    if not loss_mask.any():
        raise TrainingError(f"expected a trainable token in the batch after version {state.version}, got none among {len(numbers)} tokens")
    warmup = state.in_warmup(batch.groups[0].task)
    # A sampler that reports log-probs from before top-p and top-k is compared with the policy's from before them too.
    truncated = np.array([message.batch.column("logprob_mode")[row].as_py() == LogprobMode.SAMPLED for message, row, _ in rows])
    return TrainBatch(
        kind="sft" if warmup else "rl",
        version=state.version,
        stage_step=state.warmup_steps if warmup else state.steps,
        tokens=tokenwise("tokens"),
        offsets=offsets,
        loss_mask=loss_mask,
        sampler_logprobs=tokenwise("logprobs"),
        staleness=staleness,
        temperature=np.ones(len(rows), np.float32) if warmup else samplewise("temperature").astype(np.float32),
        top_p=np.where(truncated, samplewise("top_p"), 1.0).astype(np.float32),
        top_k=np.where(truncated, samplewise("top_k"), -1).astype(np.int32),
        rewards=np.array([np.nan if reward is None else reward for _, _, reward in rows], np.float64),
        tasks=samplewise("task").astype(np.int64),
        rollouts=samplewise("rollout").astype(np.int64),
    )


def _rows_of(
    task: int, rollouts: Mapping[int, PendingRollout], messages: Mapping[int, SampleBatch]
) -> list[tuple[SampleBatch, int, float | None]]:
    """(message, row, reward) of a group's samples, by rollout, then sample."""
    found = []
    for index in sorted(rollouts):
        message = messages[rollouts[index].sequence]
        if message.task != task:
            raise AssertionError(f"message {rollouts[index].sequence} holds task {message.task}, expected {task}")
        rows = np.flatnonzero(message.rollouts == index)
        order = np.argsort(message.ints("sample")[rows], kind="stable")
        found.extend((message, int(row), rollouts[index].reward) for row in rows[order])
    return found
