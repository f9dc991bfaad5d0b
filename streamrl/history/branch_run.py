"""`replay --set`: makes the branch's directory, trains it, writes ledger, summary, plot and the policy it ends with."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from streamrl.config.check_files import check_new_name
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.sample_blobs import replayed
from streamrl.consumers.training.steps import log_notice
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError, StreamRLError
from streamrl.history.branch import branch, changed_config
from streamrl.history.branch_file import ledger_size
from streamrl.history.replay import Range
from streamrl.history.source import Source
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.plot import write_plot
from streamrl.monitor.summary import Summary, summarize, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import check_name
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.token_weights import FOLDER


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
