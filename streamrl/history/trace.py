"""One task's life, put together from what `streamrl.history.search` has read of it, and written for a terminal of 80 columns.

It is pure: the same log gives the same life. Only who had the task in hand before is read from the reports of producers.
"""

from __future__ import annotations

import logging
import textwrap
import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.bus.reading import stored_between
from streamrl.core.records import judge
from streamrl.errors import LogTruncated, SchemaError
from streamrl.history.search import TaskLog
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.events import MetricReport
from streamrl.schemas.images import Image
from streamrl.schemas.ledger import Drop, LedgerEntry, ranges
from streamrl.schemas.samples import LogprobMode, RewardUpdate, Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, METRICS, WARMUP_SOURCE, kind_of


class Tokens(msgspec.Struct, frozen=True):
    """Consecutive tokens of one version."""

    version: str
    tokens: int
    age: int | None
    """Versions from the one that sampled them to the one that they were trained from; None: not trained."""


class TurnLife(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model; times are None where they were not recorded."""

    tokens: int
    versions: tuple[Tokens, ...]
    before: int
    """Tokens of the environment in front of it: the prompt, a tool's answer."""
    engine: str
    finish_reason: str
    asked_s: float | None
    began_s: float | None
    finished_s: float | None


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """A producer that had the task in hand before, as its reports say."""

    producer: str
    first_s: float
    """Time of its first report with the task, by its clock."""
    last_s: float
    """Time of its last report with the task."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A task in the hands of a producer; times are None where they were not recorded."""

    issued_s: float | None = None
    producer: str = ""
    claimed_s: float | None = None
    deliveries: int = 1
    """How often it had been handed out; 1 where more were not recorded."""
    earlier: tuple[Earlier, ...] = ()
    """Who had it before, as far as their reports are there."""


class SampleLife(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout."""

    sample: int
    tokens: int
    trained_tokens: int
    """Tokens with a loss mask of 1."""
    images: tuple[Image, ...] = ()
    """Images of its task's row; its tokens were sampled without them."""
    status: str
    agent: str = ""
    """Agent on whose own reward it is trained; empty: on the rollout's."""
    reward: float | None
    """The reward that it is trained on."""
    reward_parts: dict[str, float]
    started_s: float | None
    finished_s: float | None
    scored_s: float | None
    turns: tuple[TurnLife, ...]
    counters: dict[str, float]
    """Counters of its engine, over the calls of these turns."""
    demonstration: bool


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the task on the sample stream, and what became of it."""

    sequence: int
    kind: str
    """`samples`, `tombstones` or `rewards`."""
    stored_s: float
    folded: str | None
    """The version whose batch closed with it folded; None: not yet."""
    detail: str
    """Its content in words: a tombstone's reason, a reward's value, or why it cannot be read."""
    rollouts: tuple[int, ...]
    """Rollouts that it is about; none: the task as a whole."""
    drops: tuple[str, ...]
    """Reasons of the ledger not to train it, or part of it."""


class RolloutLife(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout."""

    rollout: int
    state: str
    """`trained`, `baseline` (the greedy one of a trained group, of which nothing is), `dropped`, `ended`, `stored` or `open`."""
    why: str
    """Reasons why it was not trained; empty if it was."""
    sequence: int | None
    """Sequence of the message with its samples, the one that counts."""
    samples: tuple[SampleLife, ...]


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A task from its grant to its end."""

    run: str
    task: int
    source: str
    group_size: int
    state: str
    """`trained`, `dropped`, or `open`."""
    detail: str
    """The version it was trained into, why it was not trained, or where it stands."""
    version: str | None
    """The version that it was trained into, or the one made next when it was dropped."""
    ended_s: float | None
    credit: str
    """The credit that it was issued with, in words."""
    claim: Claimed | None
    """The delivery that gave what is stored; None: nothing is stored."""
    messages: tuple[Stored, ...]
    rollouts: tuple[RolloutLife, ...]
    notes: tuple[str, ...]
    """Parts of its life that the log does not have."""


def images_text(images: Sequence[Image]) -> str:
    """Number, types and sizes of a sample's images."""
    return f"{counted(len(images), 'image')}: {', '.join(f'{one.media_type} of {one.num_bytes} bytes' for one in images)}"


def counted(number: int, what: str = "version") -> str:
    """`1 version`, `2 versions`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


Place = tuple[int, int]
"""(rollout, sequence of its message)"""


def life_of(log: TaskLog, run: str, *, group_size: int, rollout: int | None = None) -> Life:
    """The life of a task; with `rollout` of that one only.

    Args:
        log: what was read.
        run: its name.
        group_size: of the configuration, for a task that has left no message.
        rollout: index within the group.
    """
    stored = [_stored(log, message.sequence, kind_of(message.subject), index) for index, message in enumerate(log.messages)]
    samples = samples_in(log)
    stones = list(_tombstones(log))
    sizes = [one.group_size for rows in samples.values() for one in rows] + [stone.group_size for _, stone in stones]
    size = max(sizes, default=group_size)
    end = log.end
    chosen = range(size) if rollout is None else [rollout]
    lives = tuple(_rollout(log, one, samples, stones, end) for one in chosen)
    first = min((rows[0] for rows in samples.values()), key=lambda one: one.claimed_s or 0.0, default=None)
    stone = stones[0][1] if stones else None
    state, detail = _state(log, end, size, lives, stored)
    return Life(
        run=run,
        task=log.task,
        source=first.source if first is not None else stone.source if stone is not None else "",
        group_size=size,
        state=state,
        detail=detail,
        version=str(end.version) if end is not None else None,
        ended_s=end.time_s or None if end is not None else None,
        credit=_credit(log.credit, gap=log.gap),
        claim=_claim(first, stone),
        messages=tuple(one for one in stored if rollout is None or not one.rollouts or rollout in one.rollouts),
        rollouts=lives,
        notes=tuple(_notes(log, end)),
    )


def _claim(sample: Sample | None, stone: Tombstone | None) -> Claimed | None:
    """Who worked on it: as the samples say, else as a tombstone does."""
    if sample is not None:
        return Claimed(
            issued_s=sample.issued_s or None,
            producer=sample.producer,
            claimed_s=sample.claimed_s or None,
            deliveries=max(1, sample.deliveries),
        )
    if stone is None:
        return None
    told = {name: getattr(stone, name) for name in ("issued_s", "producer", "claimed_s", "deliveries")}
    return Claimed(**{name: value for name, value in told.items() if value is not msgspec.UNSET})


def _credit(entry: LedgerEntry | None, *, gap: bool) -> str:
    if gap:
        return "with which credit is not known: entries of the ledger are lost"
    if entry is None:
        return "one of the credits that the run begins with"
    return f"granted after version {entry.version}, when {entry.granted} tasks might be issued and {entry.retired} had ended"


def samples_in(log: TaskLog) -> dict[Place, list[Sample]]:
    """Readable samples by rollout and message, those of a rollout in order; with the rewards that came later, before the task's end."""
    updates = sorted(_updates(log), key=lambda update: update.revision)
    return {place: [_rewarded(row, updates) for row in rows] for place, rows in _samples(log)}


def _updates(log: TaskLog) -> Iterator[RewardUpdate]:
    for message in log.messages:
        close = log.folded(message.sequence)
        too_late = log.end is not None and (close is None or close.version.number > log.end.version.number)
        if kind_of(message.subject) == "rewards" and message.sequence not in log.letters and not too_late:
            try:
                yield decode(message.body, RewardUpdate)
            except SchemaError:
                continue


def _rewarded(row: Sample, updates: Sequence[RewardUpdate]) -> Sample:
    """The sample with the last of the updates that are for it; they are in the order of their revisions, the first of equal ones counts."""
    newest = 0
    for update in updates:
        agent = "" if isinstance(update.agent, msgspec.UnsetType) else update.agent
        theirs = 0 if isinstance(update.grading, msgspec.UnsetType) else update.grading
        if (update.rollout, agent) == (row.rollout, row.agent) and theirs in (0, row.grading) and update.revision > newest:
            newest, name = update.revision, "agent_reward" if agent else "reward"
            row = msgspec.structs.replace(row, **{name: update.reward}, reward_parts=update.reward_parts)
    return row


def _samples(log: TaskLog) -> Iterator[tuple[Place, list[Sample]]]:
    for message in log.messages:
        if kind_of(message.subject) == "samples" and message.sequence not in log.letters:
            try:
                rows = decode_samples(message.body).rows()
            except SchemaError:
                continue
            for rollout in sorted({row.rollout for row in rows}):
                of = sorted((row for row in rows if row.rollout == rollout), key=lambda row: row.sample)
                yield (rollout, message.sequence), of


def _tombstones(log: TaskLog) -> Iterator[tuple[int, Tombstone]]:
    for message in log.messages:
        if kind_of(message.subject) == "tombstones":
            try:
                yield message.sequence, decode(message.body, Tombstone)
            except SchemaError:
                continue


def _drops(log: TaskLog) -> Iterator[tuple[LedgerEntry, Drop]]:
    for entry in log.entries:
        for drop in entry.drops:
            if drop.task == log.task:
                yield entry, drop


def _words(drop: Drop) -> str:
    return f"{drop.reason}: {drop.detail}" if drop.detail else drop.reason


def _stored(log: TaskLog, sequence: int, kind: str, index: int) -> Stored:
    message = log.messages[index]
    rollouts: tuple[int, ...] = ()
    header = message.headers
    record, batch = judge(
        message.subject, sequence, message.body, header.get(HEADER_TASK), digest=header.get(HEADER_DIGEST), schema=header.get(HEADER_SCHEMA)
    )
    detail = f"cannot be read: {getattr(record, 'reason', '')}" if type(record).__name__ == "Poison" else ""
    if not detail and batch is not None:
        rollouts = tuple(sorted({int(one) for one in batch.rollouts}))
        detail = f"{counted(batch.num_rows, 'sample')}, {counted(len(batch.tokens), 'token')}, {len(message.body)} bytes"
    elif not detail and kind == "tombstones":
        stone = decode(message.body, Tombstone)
        rollouts = () if stone.rollout is None else (stone.rollout,)
        detail = f"{stone.reason}: {stone.detail}" if stone.detail else stone.reason
    elif not detail:
        update = decode(message.body, RewardUpdate)
        rollouts, detail = (update.rollout,), f"reward {update.reward:g}{_of_agent(update)}, revision {update.revision}"
    close = log.folded(sequence)
    return Stored(
        sequence=sequence,
        kind=kind,
        stored_s=message.time_s,
        folded=str(close.version) if close is not None else None,
        detail=detail,
        rollouts=rollouts,
        drops=tuple(f"{_words(drop)} (before version {entry.version})" for entry, drop in _drops(log) if drop.sequence == sequence),
    )


def _of_agent(update: RewardUpdate) -> str:
    return "" if isinstance(update.agent, msgspec.UnsetType) else f" of agent {update.agent}"


def _rollout(
    log: TaskLog, rollout: int, samples: dict[Place, list[Sample]], stones: Sequence[tuple[int, Tombstone]], end: LedgerEntry | None
) -> RolloutLife:
    used = [group for group in end.used if group.task == log.task] if end is not None else []
    trained = next((s for group in used for r, s in zip(group.rollouts, group.sequences, strict=True) if r == rollout), None)
    first = next((sequence for one, sequence in sorted(samples, key=lambda place: place[1]) if one == rollout), None)
    sequence = first if trained is None else trained
    rows = samples.get((rollout, sequence), []) if sequence is not None else []
    base = end.version.number - 1 if end is not None and trained is not None else None
    why = [
        _words(drop)
        for _, drop in _drops(log)
        if rollout in drop.rollouts or (not drop.rollouts and (drop.sequence == first or drop.retires))
    ]
    ended = [stone for _, stone in stones if stone.rollout in (None, rollout)]
    why += [f"{stone.reason}: {stone.detail}" if stone.detail else stone.reason for stone in ended if not why]
    if trained is not None:
        state = "trained" if any(row.loss_mask.any() for row in rows) or not rows else "baseline"
    elif why and (end is not None or not ended):
        state = "dropped"
    else:
        state = "ended" if ended else "stored" if first is not None else "open"
    return RolloutLife(
        rollout=rollout,
        state=state,
        why="" if trained is not None else "; ".join(dict.fromkeys(why)),
        sequence=sequence,
        samples=tuple(_sample(row, base) for row in rows),
    )


def _sample(row: Sample, base: int | None) -> SampleLife:
    return SampleLife(
        sample=row.sample,
        tokens=len(row.tokens),
        trained_tokens=int(row.loss_mask.sum()),
        images=row.image_rows,
        status=row.status.value,
        agent=row.agent,
        reward=row.trained_reward,
        reward_parts=row.reward_parts,
        started_s=row.started_s or None,
        finished_s=row.finished_s or None,
        scored_s=row.scored_s or None,
        turns=tuple(_turns(row, base)),
        counters=row.counters,
        demonstration=row.logprob_mode is LogprobMode.NONE,
    )


def _turns(row: Sample, base: int | None) -> Iterator[TurnLife]:
    """The turns as they were recorded; else the stretches of sampled tokens, of which one has the times of the sample."""
    stretches = [(turn.start, turn.start + turn.length) for turn in row.turns] or list(_sampled(row.spans))
    end_before = 0
    for index, (start, end) in enumerate(stretches):
        turn = row.turns[index] if row.turns else None
        alone = turn is None and len(stretches) == 1
        yield TurnLife(
            tokens=end - start,
            versions=tuple(_versions(row.spans, start, end, base)),
            before=start - end_before,
            engine=turn.engine if turn is not None and turn.engine else row.engine,
            finish_reason=turn.finish_reason if turn is not None and turn.finish_reason else row.finish_reason if alone else "",
            asked_s=turn.asked_s or None if turn is not None else row.started_s or None if alone else None,
            began_s=turn.began_s or None if turn is not None else row.began_s or None if alone else None,
            finished_s=turn.finished_s or None if turn is not None else row.finished_s or None if alone else None,
        )
        end_before = end


def _sampled(spans: Sequence[VersionSpan]) -> Iterator[tuple[int, int]]:
    """Stretches (start, end) that a model sampled."""
    start, begun = 0, None
    for span in (*spans, VersionSpan(0, None)):
        if span.version is not None and begun is None:
            begun = start
        elif span.version is None and begun is not None:
            yield begun, start
            begun = None
        start += span.length


def _versions(spans: Sequence[VersionSpan], start: int, end: int, base: int | None) -> Iterator[Tokens]:
    """What of the spans lies between `start` and `end`."""
    place = 0
    for span in spans:
        count = min(place + span.length, end) - max(place, start)
        if count > 0 and span.version is not None:
            yield Tokens(str(span.version), count, None if base is None else base - span.version.number)
        place += span.length


def _state(log: TaskLog, end: LedgerEntry | None, size: int, rollouts: Sequence[RolloutLife], stored: Sequence[Stored]) -> tuple[str, str]:
    if end is not None and any(group.task == log.task for group in end.used):
        number = next(index for index, group in enumerate(end.used) if group.task == log.task)
        age = f", oldest token {counted(end.staleness[number])} old" if number < len(end.staleness) and end.source != WARMUP_SOURCE else ""
        return "trained", f"trained into version {end.version}{age}"
    if end is not None:
        reasons = dict.fromkeys(_words(drop) for _, drop in _drops(log) if drop.retires)
        return "dropped", f"dropped before version {end.version}: {'; '.join(reasons)}"
    if not stored:
        return "open", _nothing_stored(log)
    if any(one.folded is None for one in stored):
        return "open", "stored; the trainer has closed no batch since"
    missing = [one.rollout for one in rollouts if one.state == "open"]
    if missing:
        who = f"; {', '.join(log.holders)} has the task in hand" if log.holders else ""
        return "open", f"waits for {len(missing)} of its {counted(size, 'rollout')}{who}"
    if any(one.reward is None and not one.demonstration for rollout in rollouts for one in rollout.samples):
        return "open", "waits for rewards"
    return "open", "complete; waits for a batch"


def _nothing_stored(log: TaskLog) -> str:
    if log.trimmed:
        return "the ledger does not name it, and the stream begins after the place where its messages would be"
    if log.holders:
        return f"in the hands of {', '.join(log.holders)}; nothing of it is stored"
    if log.queued is None:
        return "issued; nothing of it is stored"
    if log.queued:
        return "issued; waits for a producer, or one has it that does not say so"
    return "its producer has taken it off the queue and stored nothing; a trainer that is up ends it as `lost`"


def _notes(log: TaskLog, end: LedgerEntry | None) -> Iterator[str]:
    if log.trimmed:
        yield f"the sample stream begins at message {log.trimmed}: what it had of the task before that is gone, the ledger is not"
    voided = [entry.version for entry in log.entries if entry is not end and any(group.task == log.task for group in entry.used)]
    if voided and end is not None:
        yield f"also trained into {', '.join(map(str, voided))}, versions of an epoch before a restart with other digits"


WIDTH = 80
_NOT_RECORDED = "not recorded"


def life_text(life: Life) -> str:
    """Lines of at most 80 columns; times are seconds since the first that is known."""
    return "\n".join(line for line in _lines(life))


def _lines(life: Life) -> Iterator[str]:
    known = [life.claim.issued_s, life.claim.claimed_s] if life.claim is not None else []
    known += [one.stored_s or None for one in life.messages]
    start = next((value for value in known if value), None)
    number = counted(life.group_size, "rollout")
    yield from _row("", f"task {life.task} of run {life.run} ({', '.join(filter(None, (life.source, number)))}): {life.detail}", indent=2)
    yield ""
    yield from _row("issued", f"{_day(start) if start else _NOT_RECORDED}  {life.credit}")
    claim = life.claim
    if claim is not None:
        again = f"; delivery {claim.deliveries}" if claim.deliveries > 1 else ""
        if again and len(claim.earlier) < claim.deliveries - 1:
            again += f", {'those' if not claim.earlier else 'some'} before it left no record"
        who = f"by {claim.producer}" if claim.producer else "by whom was not recorded"
        for one in claim.earlier:
            yield from _row("had by", f"{one.producer}, by its reports from {_after(one.first_s, start)} to {_after(one.last_s, start)}")
        yield from _row("claimed", f"{_after(claim.claimed_s, start)}  {who}{again}")
    for one in life.messages:
        about = f"rollouts {_ranges(one.rollouts)}: " if one.rollouts else ""
        yield from _row("stored", f"{_after(one.stored_s or None, start)}  message {one.sequence}, {one.kind}: {about}{one.detail}")
        yield from _row("", f"folded before version {one.folded} closed" if one.folded else "not folded yet")
        for drop in one.drops:
            yield from _row("", f"not trained, {drop}")
    if life.version is not None:
        yield from _row("ended", f"{_after(life.ended_s, start)}  {life.detail}")
    for rollout in life.rollouts:
        yield ""
        yield from _rollout_lines(rollout, start)
    for note in life.notes:
        yield ""
        yield from _row("note", note)


def _rollout_lines(rollout: RolloutLife, start: float | None) -> Iterator[str]:
    yield from _row("", f"rollout {rollout.rollout}: {rollout.state}{': ' + rollout.why if rollout.why else ''}", indent=2)
    for sample in rollout.samples:
        parts = "".join(f", {name} {value:g}" for name, value in sample.reward_parts.items())
        reward = "none yet" if sample.reward is None else f"{sample.reward:g}{f' ({parts[2:]})' if parts else ''}"
        if sample.demonstration:
            reward = "none, a demonstration"
        name = f"sample {sample.sample}" if len(rollout.samples) > 1 else "sample"
        agent = f"agent {printable(sample.agent)}, " if sample.agent else ""
        yield from _row(name, f"{agent}{counted(sample.tokens, 'token')}, {sample.trained_tokens} trained on; {sample.status}")
        if sample.images:
            yield from _row("images", images_text(sample.images))
        yield from _turn_lines(sample, start)
        scored = f"{_after(sample.scored_s, start)}  " if sample.scored_s or sample.reward is not None else ""
        yield from _row("reward", f"{'' if sample.demonstration else scored}{reward}")


def _turn_lines(sample: SampleLife, start: float | None) -> Iterator[str]:
    before: TurnLife | None = None
    for number, turn in enumerate(sample.turns, 1):
        if before is not None:
            took = f", {turn.asked_s - before.finished_s:.3f} s" if turn.asked_s and before.finished_s else ""
            yield from _row("tools", f"{counted(turn.before, 'token')}{took}")
        times = f"asked {_after(turn.asked_s, start)}, began {_after(turn.began_s, start)}, finished {_after(turn.finished_s, start)}"
        if turn.asked_s is None and turn.began_s is None and turn.finished_s is None:
            times = f"times {_NOT_RECORDED}"
        where = " ".join(filter(None, (turn.engine, turn.finish_reason)))
        yield from _row(f"turn {number}", f"{times}{f' ({where})' if where else ''}")
        for part in turn.versions:
            age = "" if part.age is None else f", {counted(part.age)} old when trained"
            yield from _row("", f"{counted(part.tokens, 'token')} of version {part.version}{age}")
        before = turn


def _row(name: str, text: str, *, indent: int = 12) -> Iterator[str]:
    text = printable(text)  # reasons and names of parts are the user's
    if indent != 12:
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)
        return
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12) or [f"  {name}"]


def _day(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}"


def _after(seconds: float | None, start: float | None) -> str:
    return _NOT_RECORDED if seconds is None or start is None else f"{seconds - start:+.3f} s"


def _ranges(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges(numbers))


def printable(text: str, *, lines: bool = False) -> str:
    """The text with what would move a terminal's cursor or colours written as escapes; line breaks stay where `lines` are wanted."""
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)


logger = logging.getLogger(__name__)

_CLOCKS_S = 60.0
"""How far clocks of producers may be from the server's."""


async def with_deliveries(life: Life, log: Log) -> Life:
    """The life with the earlier deliveries of its task, where there were any and their times are known.

    Args:
        life: of a task.
        log: of the run; a recording has no reports. One that cannot be read is passed over.
    """
    claim = life.claim
    if claim is None or claim.deliveries < 2 or claim.issued_s is None or claim.claimed_s is None:
        return life
    found: dict[str, Earlier] = {}
    try:
        async for message in stored_between(log, METRICS, claim.issued_s - _CLOCKS_S, claim.claimed_s + _CLOCKS_S):
            try:
                one = decode(message.body, MetricReport, where=f"{message.subject} sequence {message.sequence}")
            except SchemaError as error:
                logger.warning("event=report_ignored error=%s", error.message)
                continue
            if life.task not in (one.tasks or ()) or (one.worker == claim.producer and one.time_s >= claim.claimed_s):
                continue
            known = found.get(one.worker) or Earlier(producer=one.worker, first_s=one.time_s, last_s=one.time_s)
            found[one.worker] = replace(known, last_s=one.time_s)
    except LogTruncated:  # the oldest go while they are read
        pass
    return replace(life, claim=replace(claim, earlier=tuple(sorted(found.values(), key=lambda one: one.first_s))))
