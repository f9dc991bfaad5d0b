"""Replay: the loop over a run's own log, with nothing published, compared with the ledger digest by digest."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.bus.protocol import Log
from streamrl.bus.reading import holes
from streamrl.config.tree import Config
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.reader import RecordReader, open_message
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, replayed, sample_blobs
from streamrl.consumers.training.spilled_drops import whole
from streamrl.consumers.training.steps import Books, Stepped, log_notice, train_version
from streamrl.consumers.training.stream_fold import StreamFold
from streamrl.core.fold_config import fold_config
from streamrl.core.records import Poison
from streamrl.core.state import FoldState, initial_state
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import BatchDiffers, BusError, ConfigError, TrainingError
from streamrl.history.moving import Meshes, MovingTrainer
from streamrl.history.replay_log import PastLedger, read_fingerprints, read_past, read_pending
from streamrl.history.replay_report import Comparison, Difference, ReplayReport
from streamrl.models.directories import list_checkpoints
from streamrl.schemas.ledger import LedgerEntry, standing
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.fingerprint import fingerprint_difference, fingerprint_digest, numerics_fingerprint
from streamrl.trainers.protocol import Trainer

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Deviation of a metric that passes on another fingerprint, as a fraction of its mean magnitude."""
_NONE = Version()


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions are replayed."""

    first: int = 0
    """Begin at the nearest checkpoint at or below this version number; 0: at the initial weights."""
    last: int | None = None
    """End with this version number; None: with the ledger."""


class Start(msgspec.Struct, frozen=True):
    """Where a replay begins; `path` is the checkpoint, None for the initial weights."""

    version: Version
    path: Path | None


def replay(
    *,
    config: Config,
    log: Log,
    call: Caller,
    trainer: Trainer,
    numerics: Mapping[str, str],
    also: Collection[str] = (),
    checkpoints: Path | None = None,
    span: Range | None = None,
    config_difference: str = "",
    initial_digest: str = "",
    highest: Version = _NONE,
    tolerance: float = TOLERANCE,
    num_tokens: int = 0,
    replayed: Replayed = NOTHING_REPLAYED,
    say: Callable[[str], None] = log_notice,
) -> ReplayReport:
    """Train a run again by its own ledger and compare; call from the training thread.

    Args:
        config: the run's configuration.
        log: the run's bus, or a recording of it; only read.
        call: runs a coroutine of the log's loop.
        trainer: the backend with the run's initial weights.
        numerics: this process's numerics fingerprint.
        also: digests of those that `trainer` has on other meshes, on which it trains what was trained there.
        checkpoints: the directory of the run's checkpoints, for a span that begins late.
        span: which versions; all of them if None.
        config_difference: what of `config` is known not to be what the run was trained with, in words.
        initial_digest: digest of the version 0 that the run published; empty if it is not known.
        highest: the highest version that is known to have been made; a ledger that ends before it has lost its end.
        tolerance: see `ReplayReport`.
        num_tokens: vocabulary of the model; 0: token ids are not checked.
        replayed: see `LiveTrainer`.
        say: told what people should know of how versions are computed here.

    Raises:
        LogTruncated: the sample stream does not go back far enough.
        ConfigError: the ledger does not have all versions of the span.
    """
    span = span or Range()
    subjects = Subjects(config.run.name)
    past = call(read_past(log, subjects, config.trainer.name))
    check_span(past, span, f"the ledger of run {config.run.name!r}")
    start = find_start(past, checkpoints, config.trainer.name, span.first)
    known_cause = ("config", config_difference) if config_difference else None
    if start.path is None and known_cause is None:
        known_cause = _other_weights(trainer, initial_digest)
    rules = fold_config(config, num_tokens)
    state = FoldState.decode(trainer.load(start.path)) if start.path else initial_state(rules)
    entries, lost = _there(past, state.version.number, span.last, highest, end=call(log.state(SAMPLES)).last)
    ours = fingerprint_digest(numerics)
    others = sorted({entry.fingerprint for entry in entries} - {ours, *also})
    comparison = Comparison(entries, same_fingerprint=not others, known_cause=known_cause)
    pending = call(read_pending(log, state, start.path))
    reader = RecordReader(log, call.loop, after=state.cursor, capacity=4 * config.tasks.batch_tasks)
    fold = StreamFold(
        reader=reader,
        config=rules,
        state=state,
        messages=pending.samples,
        gaps=past.gaps.values(),
        waiting=lambda now: call(_check_next(log, now, past.at(now.version.number + 1))),
        blobs=sample_blobs(log, call.loop, replayed, config),
    )
    problem, digest, difference = "", "", None
    try:
        again = _train_again(fold, trainer, past, comparison, lambda entry: call(whole(log.blobs, entry)), say)
        for digest in itertools.islice(again, len(entries)):  # noqa: B007
            pass
    except TrainingError as error:
        problem = error.message
        difference = call(_explain(log, error, known_cause)) if isinstance(error, BatchDiffers) else None
    finally:
        reader.close()
    difference = comparison.first or difference
    if difference is not None and difference.cause in ("data", "unknown"):
        lost += call(_lost_of(log, state.cursor, past, difference))
    done = entries[comparison.versions - 1].version if comparison.versions else start.version
    return ReplayReport(
        run=config.run.name,
        versions=comparison.versions,
        equal=comparison.equal,
        began=str(start.version),
        ended=str(done),
        first_difference=difference,
        same_fingerprint=not others,
        fingerprint_lines=_fingerprint_lines(numerics, others, call(read_fingerprints(log, subjects))),
        deviation=comparison.deviation,
        deviation_of=comparison.deviation_of,
        tolerance=tolerance,
        problem=problem,
        lost=tuple(lost),
        digest=digest,
    )


def _there(past: PastLedger, above: int, through: int | None, highest: Version, *, end: int) -> tuple[list[LedgerEntry], list[str]]:
    """The entries that can be trained again, where the sample stream ends at sequence `end`; and what is lost of the others, in words."""
    entries, lost = past.between(above, through), past.lost(above, through, highest)
    if entries and entries[-1].cursor > end:
        lost.append(f"the sample stream ends at sequence {end}, version {entries[-1].version} was closed at {entries[-1].cursor}")
        entries = [entry for entry in entries if entry.cursor <= end]
    return entries, lost


def _train_again(
    fold: StreamFold,
    trainer: Trainer,
    past: PastLedger,
    comparison: Comparison,
    whole: Callable[[LedgerEntry], LedgerEntry],
    say: Callable[[str], None],
) -> Iterator[str]:
    """Train version after version of the ledger into a comparison; gives the digest after each.

    Raises:
        TrainingError: it could not go on; BatchDiffers where the stream gives another batch.
    """

    def enter(stepped: Stepped) -> Version:
        assert stepped.past is not None
        entry = whole(stepped.past)
        comparison.add(stepped, entry)
        return entry.version

    while True:
        stepped = train_version(fold, trainer, Books(past.at, enter), lambda: False, say=say)
        assert stepped is not None
        yield stepped.result.digest


async def _check_next(log: Log, state: FoldState, entry: LedgerEntry | None) -> None:
    """A version of the ledger waits for its next record, which has been there: where none up to `entry`'s last is left, none will come."""
    begin = state.cursor + 1
    found = await log.first_from(SAMPLES, begin)
    if found is not None and found.sequence <= max(begin, entry.cursor if entry else 0):
        return
    raise TrainingError(
        f"version {state.version.number + 1} needs the sample stream's message {begin}, which is gone",
        hint="put a copy of the store back; the versions before it can be verified with --to",
    )


async def _lost_of(log: Log, after: int, past: PastLedger, difference: Difference) -> list[str]:
    """What is gone from the middle of the stream, so that the version of a difference may have been made of it: no entry names a reward."""
    entry = past.at(Version.parse(difference.version).number)
    gone = await holes(log, SAMPLES, first=after + 1, last=entry.cursor if entry is not None else 0)
    rows = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gone)
    return [f"the sample stream has lost message {rows}, and version {difference.version} may have been made of that"] if gone else []


def check_span(past: PastLedger, span: Range, where: str) -> None:
    """Raise ConfigError unless the span has a version and all of its versions are in the ledger."""
    newest = max(past.entries, default=0)
    hint = f"it has the versions 0 to {newest}; leave --to out for all after --from"
    if newest == 0:
        raise ConfigError(f"expected a version to train again, {where} is empty", hint="let the run train first")
    if not 0 <= span.first < newest:
        raise ConfigError(f"expected --from below {newest}, with which {where} ends, got {span.first}", hint=hint)
    if span.last is not None and not span.first < span.last <= newest:
        raise ConfigError(
            f"expected --to above --from, {span.first}, and at most {newest}, with which {where} ends, got {span.last}", hint=hint
        )


def find_start(past: PastLedger, checkpoints: Path | None, trainer: str, at_most: int) -> Start:
    """The newest checkpoint at or below a version number that lies on the ledger's line of versions, else the initial weights.

    One that was gone on from after a gap lies on it too, though its own entry may be lost.
    """
    found = list_checkpoints(checkpoints, f"{trainer}-") if checkpoints is not None and at_most > 0 else []
    for version, path in reversed(found):
        entry = past.at(version.number)
        after_gap = entry is None and any(gap.version.number == version.number for gap in standing(past.gaps).values())
        if version.number <= at_most and (after_gap or (entry is not None and entry.version == version)):
            return Start(version, path)
    return Start(Version(), None)


async def verify(
    config: Config,
    log: Log,
    model_dir: Path,
    *,
    checkpoints: Path | None = None,
    span: Range | None = None,
    config_difference: str = "",
    initial_digest: str = "",
    highest: Version = _NONE,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = log_notice,
) -> ReplayReport:
    """Replay a run against its ledger: all of `streamrl replay --verify` but for opening the log. Arguments are those of `replay`."""
    call = Caller(asyncio.get_running_loop())
    subjects = Subjects(config.run.name)
    past = await read_past(log, subjects, config.trainer.name)
    meshes = Meshes(config, past, await read_fingerprints(log, subjects))

    def work() -> ReplayReport:
        first = find_start(past, checkpoints, config.trainer.name, span.first if span else 0).version.number + 1
        # Made in the thread that steps it, like the live trainer's backend.
        with MovingTrainer(meshes.at, model_dir, first) as trainer:
            return replay(
                config=config,
                log=log,
                call=call,
                trainer=trainer,
                numerics=numerics_fingerprint(config),
                also=[fingerprint_digest(numerics_fingerprint(other)) for other in meshes.all()],
                checkpoints=checkpoints,
                span=span,
                config_difference=config_difference,
                initial_digest=initial_digest,
                highest=highest,
                tolerance=tolerance,
                num_tokens=vocab_size(model_dir),
                replayed=replayed(config, model_dir),
                say=say,
            )

    return await asyncio.to_thread(work)


def _other_weights(trainer: Trainer, published: str) -> tuple[str, str] | None:
    """(cause, detail) when the initial weights are not those that the run published as version 0."""
    ours = trainer.digest()
    if published in ("", ours):
        return None
    return "initial weights", f"version 0 was published with digest {published}, the model directory gives {ours}"


def _fingerprint_lines(ours: Mapping[str, str], others: Sequence[str], told: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    lines = [line for digest in others if digest in told for line in fingerprint_difference(ours, told[digest])]
    return tuple(dict.fromkeys(lines))


async def _explain(log: Log, differs: BatchDiffers, known_cause: tuple[str, str] | None) -> Difference:
    """Why the stream gave another batch than the ledger has."""
    if known_cause is not None and known_cause[0] == "config":
        return Difference(differs.version, differs.what, *known_cause)
    for sequence in differs.sequences:
        try:
            record = open_message(await log.fetch(SAMPLES, sequence)).record
        except BusError as gone:
            return Difference(differs.version, differs.what, "data", gone.message)
        if isinstance(record, Poison):
            return Difference(differs.version, differs.what, "schema", record.reason)
    return Difference(differs.version, differs.what, "data", "")
