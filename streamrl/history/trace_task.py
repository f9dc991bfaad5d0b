"""One task's life, put together from what `streamrl.history.trace_find` has read of it. Pure: the same log gives the same life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from streamrl.core.records import judge
from streamrl.errors import SchemaError
from streamrl.history.trace_find import TaskLog
from streamrl.history.trace_life import Claimed, Life, RolloutLife, SampleLife, Stored, Tokens, TurnLife, counted
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import Drop, LedgerEntry
from streamrl.schemas.samples import LogprobMode, RewardUpdate, Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, WARMUP_SOURCE, kind_of

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
