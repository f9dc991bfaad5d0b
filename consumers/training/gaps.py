"""What is missing between ledger, checkpoints, weights and sample stream, and how a trainer goes on all the same.

```text
ledger     1 2 3 4 . . . .      checkpoint . . . . . 6 . .      newest manifest . . . . . . . 8
                                 goes on from 0.6; the gap (5 to 6, up to 0.8) is an entry; the next version is 1.7
```

No version is ever given to two sets of parameters: whatever is known to have been made lies in an earlier epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Log
from streamrl.bus.reading import is_another, read_key
from streamrl.consumers.training.checkpoints import CHECKPOINTS, read_latest
from streamrl.consumers.training.ledger import Ledger
from streamrl.core.state import FoldConfig, FoldState
from streamrl.errors import CannotResume
from streamrl.models.directories import list_checkpoints
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant, Latest
from streamrl.schemas.ledger import Gap, LedgerEntry, ranges, standing
from streamrl.schemas.subjects import KEY_ACCEPTED_GAP, KEY_GRANTED, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest

POLICY = "policy"
NEED_CONSENT = ("middle", "all")
"""What may be lost of a ledger only with somebody's consent."""


def find_gap(
    entries: Mapping[int, LedgerEntry], gaps: Mapping[int, LedgerEntry], *, start: int, made: Mapping[str, Version], readable: int
) -> tuple[int, Gap] | None:
    """What cannot be made again, and the number of the version that is gone on from; None where nothing is missing.

    Args:
        entries: the line of versions, see `streamrl.schemas.ledger.take_entry`.
        gaps: those that are known and accepted.
        start: number of the version that a trainer goes on from.
        made: the highest version that others know of, by who knows.
        readable: last sequence of the sample stream.
    """
    last = start
    while (entry := entries.get(last + 1)) is not None and entry.cursor <= readable:
        last += 1
    epoch = max(gaps, default=0)  # what others know of an earlier one is in that gap's entry
    newest = max(entries, default=0)
    told = [entry.version for entry in (entries.get(newest), gaps.get(epoch)) if entry is not None]
    known = {"ledger": max(told, key=lambda version: version.number, default=Version())}
    known |= {who: version for who, version in made.items() if version.epoch >= epoch}
    known_by = max(known, key=lambda who: known[who].number)
    highest = known[known_by].number
    excused = {
        n
        for one in standing(gaps).values()
        if one.gap is not UNSET
        for a, b in one.gap.missing
        for n in range(a, min(b, one.version.number) + 1)
    }
    missing = ranges(number for number in range(1, highest + 1) if number not in entries and number not in excused)
    if not missing and last >= highest:
        return None
    if missing and not entries:
        lost = "all"
    elif missing and missing[0][0] < newest:
        lost = "middle"
    else:
        lost = "end" if missing else "samples"
    return last, Gap(lost=lost, missing=missing, highest=known[known_by], known_by=known_by)


def describe_gap(gap: Gap, trainer: str) -> str:
    """What is missing, in words."""
    if gap.lost == "samples":
        return f"the sample stream has lost messages: what version {gap.highest} and those before it were made of is not there"
    rows = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gap.missing)
    what = {"end": "its end", "middle": "entries in its middle", "all": "all of its entries"}[gap.lost]
    return f"the ledger of {trainer!r} has lost {what}: there is none for version {rows}, and by the {gap.known_by} {gap.highest} was made"


async def versions_made(log: Log, subjects: Subjects, latest: Latest | None, *, trainer: str, run_path: Path) -> dict[str, Version]:
    """The highest version that the newest manifest, the newest checkpoint's key and the checkpoints' directory know of."""
    found: dict[str, Version] = {}
    manifest = await log.last(subjects.weights(POLICY))
    if manifest is not None:
        found["manifest"] = decode(manifest.body, Manifest, where=manifest.subject).version
    saved = [version for version, _ in list_checkpoints(run_path / CHECKPOINTS, f"{trainer}-")]
    saved += [latest.version] if latest is not None else []
    if saved:
        found["checkpoint"] = max(saved, key=lambda version: (version.number, version.epoch))
    return found


def refusal(gap: Gap, trainer: str) -> CannotResume:
    """The error for a gap that somebody has to accept."""
    return CannotResume(
        describe_gap(gap, trainer),
        hint="put a copy of the store back; `streamrl up --accept-gap` goes on, in a new epoch, and what is missing can never be verified",
        lost=gap.lost,
    )


async def enter_gap(bus: Bus, subjects: Subjects, ledger: Ledger, state: FoldState, config: FoldConfig, run: RunDir) -> str:
    """Compare ledger, checkpoint, newest manifest and sample stream; where versions are missing, write that into the ledger.

    Args:
        bus: connected.
        subjects: of the run.
        ledger: loaded, with this trainer's fence.
        state: what the trainer goes on from.
        config: the decisions.
        run: its directory.

    Returns:
        What was lost and how it goes on, in words; empty where nothing was.

    Raises:
        CannotResume: more than the end of the ledger is missing, and nobody has accepted that.
        Fenced: another trainer has taken over.
    """
    latest = await read_latest(bus, ledger.trainer)
    made = await versions_made(bus, subjects, latest, trainer=ledger.trainer, run_path=run.path)
    readable = await _readable(bus, ledger, state, config)
    found = find_gap(ledger.entries, ledger.gaps, start=state.version.number, made=made, readable=readable)
    if found is None:
        return ""
    last, gap = found
    if gap.lost in NEED_CONSENT:
        accepted = await bus.kv.get(KEY_ACCEPTED_GAP)
        if accepted is None or accepted.value != str(ledger.tail).encode():
            raise refusal(gap, ledger.trainer)
    grant = await read_key(bus.kv, KEY_GRANTED, Grant)
    epoch = 1 + max(ledger.max_epoch, state.epochs[-1].epoch, *(version.epoch for version in made.values()), 0)
    entry = LedgerEntry(
        run=run.name,
        trainer=ledger.trainer,
        version=Version(epoch, last),
        source="",
        used=(),
        cursor=state.cursor,
        granted=max(state.granted, grant.granted if grant else 0),
        retired=state.retired,
        gap=replace(gap, first=last),
        fence=ledger.fence,
        time_s=time.time(),
    )
    await ledger.append(entry)
    return f"{describe_gap(gap, ledger.trainer)}; goes on from version {last} in epoch {epoch}"


async def _readable(bus: Bus, ledger: Ledger, resumed: FoldState, config: FoldConfig) -> int:
    """Last sequence of the sample stream up to which it is what the ledger was made of.

    A stream that lost its end may have grown again with other messages before anybody looked; all after the loss are others. Or its server
    knew where the end had been, and left a hole: what was made of messages in it is lost, not what was made once readers had passed it.

    Args:
        bus: connected.
        ledger: its line of versions.
        resumed: what is gone on from.
        config: the decisions.
    """
    entries, state = ledger.entries, await bus.state(SAMPLES)
    newest = start = resumed.version.number
    while (entry := entries.get(newest + 1)) is not None and entry.cursor <= state.last:
        newest += 1
    number = newest
    while number > start and await is_another(bus, SAMPLES, entries[number].cursor, entries[number].cursor_s or 0.0):
        number -= 1
    if number > start and state.messages < state.last - state.first + 1:
        from streamrl.consumers.training.refold import last_agreed  # Arrow takes 25 MB, and only a stream with a hole is read

        gaps = [gap for _, gap in sorted(ledger.gaps.items())]
        number = min(number, await last_agreed(bus, resumed, entries, gaps, config))
    return state.last if number == newest else entries[number + 1].cursor - 1
