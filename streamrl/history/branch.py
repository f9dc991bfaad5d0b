"""Branch: a new run that trains another loss, rate, bound or batch size on its parent's recorded stream, without engines.

Its parent is (run, version). It reads the parent's log and writes into its own directory only: `ledger.jsonl`, `branch.json`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.config.bridges import bridges
from streamrl.config.filters import DECIDED
from streamrl.config.load import override, override_keys
from streamrl.config.loss import estimator_of
from streamrl.config.tree import Config
from streamrl.consumers.training.books import entry_of
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.divergence import Divergence
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, sample_blobs
from streamrl.consumers.training.steps import Books, Stepped, log_notice, train_version
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldState
from streamrl.errors import ConfigError
from streamrl.history.branch_file import LEDGER_FILE, BranchFile
from streamrl.history.branch_fold import BranchFold, parents_cut
from streamrl.history.branch_state import begin, check_gaps, translate
from streamrl.history.replay import Range, check_span, find_start
from streamrl.history.replay_log import PastLedger, read_past, read_pending
from streamrl.runtime.rundir import BRANCH_FILE
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import PARENT_DISTANCE
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.token_weights import logprob_distance, read_token_weights

logger = logging.getLogger(__name__)

CHANGES_LOSS = (
    "loss",
    *(key for bridge in bridges() for key in bridge.of_trainer),
    "reward.overlong_buffer",
    "reward.overlong_penalty",
    "reward.overlong_length",
    "reward.length",
    "trainer.optimizer",
    "trainer.minibatches",
    "trainer.micro_tokens",
    "trainer.routing_replay",
    "trainer.support_replay",
    "trainer.gradient_cosine",
    "warmup.learning_rate",
    "run.steps",
)
"""Keys whose change leaves the batches alone."""
CHANGES_BATCHES = (
    *("tasks.batch_tasks", "tasks.max_staleness", "tasks.stale", "tasks.expire_versions", "tasks.drop_zero_variance"),
    *DECIDED,
)
"""Keys whose change may give other batches of the same samples."""


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key that changes nothing when recorded samples are trained again."""
    known = (*CHANGES_LOSS, *CHANGES_BATCHES)
    for key in override_keys(overrides):
        if not any(key == name or key.startswith(f"{name}.") for name in known):
            raise ConfigError(
                f"{key} has no part in training recorded samples again",
                hint=f"a branch may change {', '.join(known)}; for anything else start a run",
                key=key,
            )


def _with_distance(stepped: Stepped, tokens: Path | None) -> Stepped:
    """The same with the distance to the parent at the version that it made of the same samples, where its log-probs are still there."""
    if tokens is None or stepped.beside is None or stepped.result.tokens is None:
        return stepped
    theirs = read_token_weights(tokens, stepped.beside.version)
    distance = logprob_distance(theirs, stepped.arrays, stepped.result.tokens)
    return stepped if distance is None else replace(stepped, metrics={**stepped.metrics, PARENT_DISTANCE: distance})


def changed_config(config: Config, overrides: Sequence[str]) -> Config:
    """A parent's configuration with overrides; `run.steps` among them is the length of the learning rate's schedule, unless that is, too.

    Raises:
        ConfigError: an override that a branch or a tap cannot have, or an estimator that asks for other rollouts.
    """
    check_overrides(overrides)
    keys = override_keys(overrides)
    if "run.steps" in keys and "trainer.optimizer.decay_steps" not in keys:
        overrides = [*overrides, "trainer.optimizer.decay_steps=0"]
    changed = override(config, overrides)
    if estimator_of(changed.loss).greedy != estimator_of(config.loss).greedy:
        was, now = config.loss.advantage, changed.loss.advantage
        raise ConfigError(
            f"loss.advantage = {now} cannot be trained on samples recorded under {was}: one of the two has a greedy rollout beside those "
            "of each task, the other has none",
            hint="start a run for it",
            key="loss.advantage",
        )
    return changed


def branch(
    *,
    config: Config,
    parent: Config,
    log: Log,
    call: Caller,
    trainer: Trainer,
    checkpoints: Path,
    span: Range,
    directory: Path,
    overrides: Sequence[str],
    fingerprint: str,
    num_tokens: int = 0,
    replayed: Replayed = NOTHING_REPLAYED,
    say: Callable[[str], None] = log_notice,
    tokens: Path | None = None,
) -> list[LedgerEntry]:
    """Train the branch to the end of the span; call from the training thread. Returns its ledger.

    Args:
        config: the branch's: the parent's with other values and a name of its own.
        parent: the parent's.
        log: the parent's log; only read.
        call: runs a coroutine of the log's loop.
        trainer: made from `config`, with the parent's initial weights.
        checkpoints: the parent's.
        span: the parent's versions; its beginning is where the branch leaves.
        directory: the branch's own.
        overrides: what was changed, for branch.json.
        fingerprint: digest of this process's numerics fingerprint.
        num_tokens: vocabulary of the model; 0: token ids are not checked.
        replayed: see `LiveTrainer`.
        say: told what people should know of how versions are computed.
        tokens: folder where the parent's trainer has left its log-probs, for the distance to the parent; None: there is none.

    Raises:
        LogTruncated: the parent's stream does not go back far enough.
        ConfigError: the parent does not have all versions of the span, or lost some of them.
    """
    past: PastLedger = call(read_past(log, Subjects(parent.run.name), parent.trainer.name))
    check_span(past, span, f"the ledger of run {parent.run.name!r}")
    start = find_start(past, checkpoints, parent.trainer.name, span.first)
    before = FoldState.decode(trainer.load(start.path)) if start.path else None
    mine, theirs = fold_config(config, num_tokens), fold_config(parent, num_tokens)
    state = begin(mine, theirs, before)
    across = "end before it with --to, or begin at the checkpoint that it went on from, or a later one, with --from"
    check_gaps(state, past.entries, past.gaps, through=span.last, hint=across)
    gaps = [gap for _, gap in sorted(past.gaps.items())]
    stretch = past.between(start.version.number, span.last)
    pending = call(read_pending(log, state.own, start.path))
    note = BranchFile(
        branch=config.run.name,
        parent=parent.run.name,
        parent_version=str(start.version),
        overrides=tuple(overrides),
        same_batches=mine == theirs,
        created_s=time.time(),
    )
    (directory / BRANCH_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=2) + b"\n")
    reader = RecordReader(log, call.loop, after=state.cursor, capacity=4 * config.tasks.batch_tasks)
    fold = BranchFold(
        reader=reader,
        parent=PastLedger(stretch),
        config=mine,
        parent_config=theirs,
        state=state,
        messages={sequence: translate(samples, state.numbers) for sequence, samples in pending.samples.items()},
        gaps=lambda: gaps,
        blobs=sample_blobs(log, call.loop, replayed, config),
    )
    entries: list[LedgerEntry] = []
    try:
        with (directory / LEDGER_FILE).open("wb") as file:

            def enter(stepped: Stepped) -> Version:
                entry = entry_of(_with_distance(stepped, tokens), stepped.state.version, config, fingerprint)
                entries.append(entry)
                file.write(msgspec.json.encode(entry) + b"\n")
                file.flush()
                return entry.version

            books = Books(lambda number: None, enter)  # all of its versions are new
            # A record that is awaited comes: the parent's ledger says so. Without a further entry there is nothing left.
            end = stretch[-1].version.number
            cut = parents_cut(fold, config, parent)
            divergence = Divergence(config.trainer.max_unlearned, say)
            while stepped := train_version(fold, trainer, books, lambda: fold.state.parent.version.number >= end, cut=cut, say=say):
                divergence.check(stepped.state.version, stepped.result)
    finally:
        reader.close()
    return entries
