"""Replay: the loop over a run's own log, with nothing published, compared with the ledger digest by digest."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from streamrl.bus.protocol import Log
from streamrl.bus.reading import holes
from streamrl.config.tree import Config
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.reader import RecordReader, open_message
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, replayed, sample_blobs
from streamrl.consumers.training.spilled_drops import whole
from streamrl.consumers.training.steps import Books, Stepped, log_notice, recorded_choices, same_result, train_version
from streamrl.consumers.training.stream_fold import StreamFold
from streamrl.core.assembly import ages
from streamrl.core.fold_config import fold_config
from streamrl.core.records import Poison
from streamrl.core.state import FoldState, initial_state
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import BatchDiffers, BusError, ConfigError, TrainingError
from streamrl.history.moving import Meshes, MovingTrainer
from streamrl.history.replay_log import PastLedger, read_fingerprints, read_past, read_pending
from streamrl.models.directories import list_checkpoints
from streamrl.schemas.ledger import Choices, LedgerEntry, standing
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.fingerprint import fingerprint_difference, fingerprint_digest, numerics_fingerprint
from streamrl.trainers.protocol import Trainer

COMPARED = ("train/loss", "train/grad_norm", "train/tis", "train/entropy_loss", "train/answer_probability")
"""Metrics that follow the digits; those of other numerics stay close, and are compared by tolerance."""
CRITIC = "train/value_norm"
"""Stands for the critic's parameters, which no digest in the ledger covers."""
QUOTED = 400
"""Letters of a value that a report quotes; an entry may have any number of drops."""


class Difference(msgspec.Struct, frozen=True):
    """The first version that came out differently."""

    version: str
    what: str
    cause: str
    """`config`, `initial weights`, `data`, `schema`, `numerics`, or `unknown`: same batch, same fingerprint, other digits."""
    detail: str = ""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found."""

    run: str
    versions: int
    """Ledger entries replayed."""
    equal: int
    """Entries whose digest came out the same."""
    began: str = "0.0"
    """Version that it began from: the initial weights, or a checkpoint."""
    ended: str = "0.0"
    first_difference: Difference | None = None
    same_fingerprint: bool = True
    """Whether the numerics fingerprint equals the ledger's; if not, digits may differ without anything being wrong."""
    fingerprint_lines: tuple[str, ...] = ()
    """Entries of the fingerprint that differ, where the run told them."""
    deviation: float = 0.0
    """Greatest distance of a compared metric from the ledger's, as a fraction of its mean magnitude over the ledger."""
    deviation_of: str = ""
    """Which metric at which version that was."""
    tolerance: float = 0.0
    """Greatest deviation that passes when the fingerprints differ."""
    problem: str = ""
    """Why it could not go on, or an empty string."""
    lost: tuple[str, ...] = ()
    """What of these versions the log has no more, in words."""
    digest: str = ""
    """Digest of the parameters at the end."""

    @property
    def by_tolerance(self) -> bool:
        """Whether digests differ, and may: the fingerprint is another one and the batches are the ledger's."""
        first = self.first_difference
        return first is not None and first.cause == "numerics" and not self.same_fingerprint

    @property
    def ok(self) -> bool:
        """Whether nothing is lost and every entry came out with its digest, or on another fingerprint within the tolerance."""
        if self.problem or self.lost or not self.versions:
            return False
        return self.first_difference is None or (self.by_tolerance and self.deviation <= self.tolerance)

    @property
    def lines(self) -> list[str]:
        """The report for a person."""
        found: list[str] = []
        if not self.same_fingerprint:
            found.append("numerics fingerprint differs from the run's: digits may differ without a fault")
            found += [f"  {line}" for line in self.fingerprint_lines or ("the run's values are not recorded",)]
        found.append(f"{self.equal} of {self.versions} versions after {self.began} have the digest of the ledger")
        first = self.first_difference
        if first is not None:
            found.append(f"first difference: version {first.version}: {first.what}")
            found.append(f"cause: {first.cause}" + (f": {first.detail}" if first.detail else ""))
        if self.by_tolerance:
            verdict = "within" if self.deviation <= self.tolerance else "beyond"
            found.append(
                f"compared by tolerance: the greatest deviation is {self.deviation:.2g} ({self.deviation_of}), {verdict} {self.tolerance:g}"
            )
        found += [f"lost: {text}" for text in self.lost]
        if self.problem:
            found.append(f"stopped: {self.problem}")
        return found


class Comparison:
    """Holds replayed versions against their ledger entries, one after the other.

    Args:
        entries: all that will be replayed; their mean magnitudes are the scale of deviations.
        same_fingerprint: see `ReplayReport`.
        known_cause: (cause, detail) found beforehand that explains any other digit: the configuration or the initial weights.
    """

    def __init__(self, entries: Sequence[LedgerEntry], *, same_fingerprint: bool, known_cause: tuple[str, str] | None) -> None:
        self.versions = 0
        self.equal = 0
        self.first: Difference | None = None
        self.deviation = 0.0
        self.deviation_of = ""
        self._same_fingerprint = same_fingerprint
        self._known_cause = known_cause
        self._scale = {name: _magnitude(entries, name) for name in COMPARED}

    def add(self, stepped: Stepped, past: LedgerEntry) -> bool:
        """One more version; returns whether its digest, and its reference and critic where it has them, are the ledger's."""
        same_policy = stepped.result.digest == past.digest
        same_reference = same_result(stepped.result, past) or not same_policy
        ours, theirs = stepped.metrics.get(CRITIC), past.metrics.get(CRITIC)
        same = same_policy and same_reference and ours == theirs
        self.versions += 1
        self.equal += same
        for name, distance in self._deviations(stepped.metrics, past.metrics).items():
            if distance > self.deviation:
                self.deviation, self.deviation_of = distance, f"{name} at version {past.version}"
        books = differing_books(stepped, past)
        if self.first is None and (books or not same):
            what = books
            if not same_policy:
                what = f"the ledger has digest {past.digest}, the replay {stepped.result.digest}"
            elif not same_reference:
                digests = f"{past.reference or 'none'} in the ledger, {stepped.result.reference or 'none'} in the replay"
                what = f"the reference has digest {digests}; the policy's are the same"
            elif not same:
                what = f"the critic's parameters have norm {theirs!r} in the ledger, {ours!r} in the replay; the policy's are the same"
            self.first = Difference(str(past.version), what, *self._cause(stepped, past, books))
        return same

    def _cause(self, stepped: Stepped, past: LedgerEntry, books: str) -> tuple[str, str]:
        if self._known_cause is not None:
            return self._known_cause
        if books:
            return "data", books
        if past.micro_tokens is not UNSET and past.micro_tokens != stepped.result.micro_tokens:
            return (
                "numerics",
                f"micro-batches of {past.micro_tokens} tokens in the ledger, {stepped.result.micro_tokens} here: out of memory",
            )
        if computed := differing_choices(stepped.result.choices, past):
            return "numerics", computed
        if not self._same_fingerprint:
            return "numerics", "the fingerprints differ, the batch is the same"
        distances = self._deviations(stepped.metrics, past.metrics)
        name = max(distances, key=lambda key: distances[key], default="")
        detail = "batch and fingerprint are the same"
        if name:
            detail += f"; {name} is {past.metrics[name]!r} in the ledger, {stepped.metrics[name]!r} here"
        return "unknown", detail

    def _deviations(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
        names = [name for name in COMPARED if name in ours and name in theirs and self._scale[name] > 0]
        return {name: abs(ours[name] - theirs[name]) / self._scale[name] for name in names}


def differing_books(stepped: Stepped, past: LedgerEntry) -> str:
    """What of the batch itself is not as the ledger has it; an empty string if all is. Numerics have no part in these numbers."""
    before, arrays = stepped.before, stepped.arrays
    pairs: list[tuple[str, object, object]] = [
        ("samples", past.num_samples, arrays.num_samples),
        ("tokens", past.num_tokens, arrays.num_tokens),
        ("ages", past.staleness, tuple(ages(stepped.batch, before)["total"])),
        ("drops", past.drops, before.drops),
    ]
    for name in ("rollout/raw_reward", "rollout/tokens_trained", "staleness/mean"):
        if name in past.metrics and name in stepped.metrics:
            pairs.append((name, past.metrics[name], stepped.metrics[name]))
    found = [f"{name}: {_short(theirs)} in the ledger, {_short(ours)} here" for name, theirs, ours in pairs if theirs != ours]
    return "; ".join(found)


def differing_choices(choices: Choices | None, past: LedgerEntry) -> str:
    """How a version was computed otherwise than its entry says, as far as digits depend on it; an empty string if it was not."""
    ours, theirs = choices or Choices(), recorded_choices(past) or Choices()
    found = [
        f"{name}: {getattr(theirs, name)} in the ledger, {getattr(ours, name)} here" for name in ("attention", "compiled", "row_length")
    ]
    same = [ours.attention in (theirs.attention, "flash"), ours.compiled == theirs.compiled, ours.row_length == theirs.row_length]
    return "; ".join(text for text, equal in zip(found, same, strict=True) if not equal)  # older entries do not name `flash`


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}... ({len(text)} letters)"


def _magnitude(entries: Sequence[LedgerEntry], name: str) -> float:
    values = [abs(entry.metrics[name]) for entry in entries if name in entry.metrics]
    return sum(values) / len(values) if values else 0.0


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
