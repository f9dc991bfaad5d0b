"""Branch: a new run that trains another loss, rate, bound or batch size on its parent's recorded stream, without engines.

Its parent is (run, version). It reads the parent's log and writes into its own directory only: `ledger.jsonl`, `branch.json`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.config.bridges import bridges
from streamrl.config.check_files import check_new_name
from streamrl.config.filters import DECIDED
from streamrl.config.load import override, override_keys
from streamrl.config.loss import estimator_of
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.books import entry_of
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.divergence import Divergence
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, replayed, sample_blobs
from streamrl.consumers.training.steps import Books, Stepped, log_notice, train_version
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldState
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError, StreamRLError
from streamrl.history.branch_file import LEDGER_FILE, BranchFile, ledger_size
from streamrl.history.branch_fold import BranchFold, begin, check_gaps, parents_cut, translate
from streamrl.history.replay import Range, check_span, find_start
from streamrl.history.replay_log import PastLedger, read_past, read_pending
from streamrl.history.source import Source
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.plot import write_plot
from streamrl.monitor.summary import Summary, summarize, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects, check_name
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import PARENT_DISTANCE
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.token_weights import FOLDER, logprob_distance, read_token_weights

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


async def train_branch(
    source: Source,
    *,
    overrides: Sequence[str],
    name: str | None,
    base: Path,
    span: Range,
    say: Callable[[str], None] = log_notice,
) -> tuple[RunDir, Summary]:
    """Train a branch of `source` into a new run directory under `base`; the parent is only read.

    Args:
        source: the parent.
        overrides: `a.b=c`, of the keys that a branch may change.
        name: the branch's run id; None: the parent's with the first free number behind it.
        base: directory that holds the runs.
        span: the parent's versions.
        say: told what people should know of how versions are computed.

    Raises:
        ConfigError: an override that a branch cannot have, a name that is taken, or no versions in the span.
        LogTruncated: the parent's stream does not go back far enough.
    """
    changed = changed_config(source.config, overrides)
    run = _new_directory(base, name, source.config.run.name)
    config = replace(changed, run=replace(changed.run, name=run.name, dir=str(base)))
    run.write_config(config)
    with lock_run(run):  # it counts as running until it ends
        return run, await _train(source, config, run, overrides=overrides, span=span, say=say)


async def _train(
    source: Source, config: Config, run: RunDir, *, overrides: Sequence[str], span: Range, say: Callable[[str], None]
) -> Summary:
    """Train the branch in its directory, which goes again if nothing was trained."""
    call = Caller(asyncio.get_running_loop())
    began = time.monotonic()

    def work() -> list[LedgerEntry]:
        # Made in the thread that steps it, like the live trainer's backend.
        with open_trainer(config, source.model_dir) as trainer:
            entries = branch(
                config=config,
                parent=source.config,
                log=source.log,
                call=call,
                trainer=trainer,
                checkpoints=source.checkpoints,
                span=span,
                directory=run.path,
                overrides=overrides,
                fingerprint=fingerprint_digest(numerics_fingerprint(config)),
                num_tokens=vocab_size(source.model_dir),
                replayed=replayed(config, source.model_dir),
                say=say,
                tokens=source.run.path / FOLDER if source.run is not None else None,
            )
            if entries:
                trainer.export(run.export_path(entries[-1].version))
            return entries

    try:
        entries = await asyncio.to_thread(work)
    except StreamRLError:
        # What was refused before its first version leaves nothing behind; else the ledger so far is worth looking at.
        if not ledger_size(run.path):
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    view = RunView(run.name, steps=config.run.steps, warmup_steps=config.warmup.max_steps)
    for entry in entries:
        view.ledger(decode(encode(entry), LedgerLine))
    summary = summarize(view, wall_s=time.monotonic() - began)
    write_summary(summary, run.summary_path)
    if view.reward_points:
        await asyncio.to_thread(write_plot, view, run.plot_path)
    return summary


def _new_directory(base: Path, name: str | None, parent: str) -> RunDir:
    if name is None:
        number = 1
        while (base / f"{parent}-branch-{number}").exists():
            number += 1
        name = f"{parent}-branch-{number}"
    run = RunDir(base / check_name("run name", name))
    check_new_name(RunConfig(name=name, dir=str(base)))
    try:
        run.path.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise ConfigError(
            f"expected a name that no run has for the branch, got {name!r}: {run.path} exists", hint="choose another --name"
        ) from error
    except OSError as error:
        raise ConfigError(f"the branch's directory {run.path} cannot be made: {error.strerror}", hint="choose another --dir") from error
    return run
