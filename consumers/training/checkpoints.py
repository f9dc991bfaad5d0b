"""Checkpoints of a live trainer, and what may happen only behind them: the `latest` pointer, the position, trimming."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Log, Message
from streamrl.bus.reading import is_another, read_key
from streamrl.config.tree import TrainerConfig
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.carried import carried_files, fetch_messages, held, oldest_read_again
from streamrl.consumers.training.trimming import holds_the_stream, nearly_full, release, trim_if_full
from streamrl.core.state import FoldState
from streamrl.errors import LogTruncated, StreamRLError
from streamrl.models.directories import prune
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Latest, Position
from streamrl.schemas.subjects import HEADER_TASK, KEY_LATEST, PREFIX_POSITIONS, SAMPLES
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import Trainer

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Their folder in the run directory."""
LOOK_EVERY_S = 0.25
"""The stream's state is asked for no more often than this, however short the steps."""


class Saving(msgspec.Struct, frozen=True):
    """A checkpoint that is being written."""

    future: Any  # Future[None]; msgspec has no type for it
    latest: Latest


class AroundFold(Protocol):
    """A state with the fold's in it, such as a tap's."""

    @property
    def own(self) -> FoldState: ...
    @property
    def version(self) -> Version: ...
    @property
    def cursor(self) -> int: ...
    @property
    def oldest_needed(self) -> int: ...
    def encode(self) -> bytes: ...


Resumable = FoldState | AroundFold
"""A state that a trainer can go on from."""


class Checkpointer:
    """Writes checkpoints in the background, one at a time; `poll` moves the pointers once the files are complete.

    Order: files synced, read back and renamed -> `latest` -> position -> trim. A crash between any two leaves the older, complete state in
    force. The position is that of the oldest checkpoint that is kept, so that a restart may go back to any of them.
    All methods are called from the training thread; `call` runs a coroutine on the bus's loop and waits for it.
    With `lease_s` (a tap) the position lapses unless it is kept, and trimming is left to the run's own trainer.

    When the sample stream is nearly full, older checkpoints are given up; when that is not enough, a new one carries the messages of its
    pending groups, so that everything that has been read can be trimmed: whatever the groups wait for finds room, and a full stream cannot
    come to a standstill.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        call: Caller,
        trainer: Trainer,
        settings: TrainerConfig,
        run_path: Path,
        identity: str,
        lease_s: int | None = None,
    ) -> None:
        self._bus = bus
        self._call = call
        self._trainer = trainer
        self._name = settings.name
        self._run_path = run_path
        self._every = settings.checkpoint_every
        self._keep = settings.keep_checkpoints
        self._identity = identity
        self._lease_s = lease_s
        self._saving: Saving | None = None
        self._kept: tuple[Latest, ...] = ()
        """Complete checkpoints, the newest first."""
        self._carried: dict[int, Message] = {}
        """What is held and may be gone from the stream, by sequence."""
        self._look_at_s = 0.0
        self._nearly_full = False
        """What the last look found."""

    def resumed(self, latest: Latest | None, carried: Mapping[int, Message] | None = None) -> None:
        """Tell it which checkpoint the trainer goes on from, and which messages that one carries.

        With None it is one of another trainer: this one has no checkpoint yet, but what is carried is carried on.
        """
        self._kept = latest.kept if latest is not None else ()
        self._carried = dict(carried or {})

    def after_step(self, state: Resumable) -> None:
        """Begin a checkpoint when one is due, and finish the one that is done."""
        self.poll()
        if self._saving is not None:
            return
        pressed = self._pressed()
        saved = self._kept[0].version.number if self._kept else 0
        if pressed or state.version.number - saved >= self._every:
            self.begin(state, carry=pressed)

    def while_waiting(self, state: Resumable) -> None:
        """Finish the checkpoint that is done; make room if the stream is nearly full: nothing may come any more otherwise.

        Called often while the training thread waits for records; looks at the stream a few times a second.
        """
        self.poll()
        if self._saving is not None or time.monotonic() < self._look_at_s:
            return
        if self._pressed() and state.cursor > (self._kept[0].cursor if self._kept else 0):
            self.begin(state, carry=True)

    def begin(self, state: Resumable, *, carry: bool = False) -> None:
        """Snapshot now and write in the background; with `carry`, the messages of all pending groups too."""
        path = f"{CHECKPOINTS}/{self._name}-v{state.version.number:08d}-e{state.version.epoch}"
        oldest = self._carry(state if isinstance(state, FoldState) else state.own, everything=carry)
        beside = carried_files(self._carried.values())
        future: Future[None] = self._trainer.save(self._run_path / path, state.encode(), version=state.version, beside=beside)
        carried = tuple(sorted(self._carried))
        tasks = tuple(int(self._carried[sequence].headers.get(HEADER_TASK, -1)) for sequence in carried)
        latest = Latest(self._name, state.version, path, state.cursor, oldest, self._identity, carried, carried_tasks=tasks or UNSET)
        self._saving = Saving(future, latest)

    def _carry(self, state: FoldState, *, everything: bool) -> int:
        """Bring `_carried` up to date; returns the lowest sequence that is still needed from the stream.

        What an earlier checkpoint carried may have been trimmed, so it is carried for as long as its group is pending.
        """
        needed = held(state)
        self._carried = {sequence: message for sequence, message in self._carried.items() if sequence in needed}
        if everything:
            self._carried |= self._call(fetch_messages(self._bus, sorted(needed - self._carried.keys())))
        return oldest_read_again(state, self._carried)

    def poll(self) -> None:
        """Move the pointers if the files are complete; raises what the writing raised."""
        if self._saving is not None and self._saving.future.done():
            self._finish()

    def flush(self, state: Resumable) -> None:
        """Wait until the newest state is saved and pointed to."""
        if self._saving is not None:
            self._finish()
        if not self._kept or self._kept[0].version != state.version:
            self.begin(state)
            self._finish()

    def finish_before_failing(self) -> None:
        """Let the checkpoint under way count, which the process would end behind anyway: less is trained again. Raises nothing."""
        if self._saving is None:
            return
        try:
            self._finish()
        except StreamRLError as error:
            logger.warning("event=checkpoint_not_finished why=%s", error)

    def _finish(self) -> None:
        saving = self._saving
        assert saving is not None
        saving.future.result()
        latest = saving.latest
        self._saving = None
        self._keep_only((latest, *(one for one in self._kept if one.version.number < latest.version.number))[: self._keep])
        logger.info(
            "event=checkpoint_complete version=%s cursor=%d carried=%d path=%s",
            latest.version,
            latest.cursor,
            len(latest.carried),
            latest.path,
        )
        self._nearly_full = False  # perhaps: the position has moved, the next look tells
        if self._lease_s is None:
            self._make_room(warn=True)

    def _keep_only(self, kept: tuple[Latest, ...]) -> None:
        """Point to these checkpoints, the newest first, hold the stream for the oldest of them, and remove the others."""
        self._call(point_to(self._bus, kept, lease_s=self._lease_s))
        still = carried_tasks(kept)
        self._call(release(self._bus, {k: task for k, task in carried_tasks(self._kept).items() if k not in still}))
        self._kept = kept
        prune(self._run_path / CHECKPOINTS, keep={self._run_path / one.path for one in kept}, prefix=f"{self._name}-")

    def _pressed(self) -> bool:
        """Whether the stream was so full at the last look that only a newer position could let it be trimmed."""
        now = time.monotonic()
        if now >= self._look_at_s:
            self._look_at_s = now + LOOK_EVERY_S
            self._nearly_full = self._call(nearly_full(self._bus)) and self._make_room(warn=False)
        return self._nearly_full

    def _make_room(self, *, warn: bool) -> bool:
        """Trim what may be trimmed, giving up older checkpoints as far as it takes; whether the stream is nearly full all the same.

        A tap does not trim; it gives up one checkpoint a look.
        """
        while True:
            if self._lease_s is None and not self._call(trim_if_full(self._bus, warn=warn and len(self._kept) < 2)):
                return False
            if len(self._kept) < 2 or not self._call(holds_the_stream(self._bus, self._name)):
                return True
            logger.info("event=checkpoint_given_up version=%s reason=the_sample_stream_is_full", self._kept[-1].version)
            self._keep_only(self._kept[:-1])
            if self._lease_s is not None:
                return False


def latest_key(trainer: str) -> str:
    """Key of a trainer's newest complete checkpoint."""
    return f"{KEY_LATEST}/{trainer}"


async def read_latest(bus: Bus, trainer: str) -> Latest | None:
    """The newest complete checkpoint, or None."""
    return await read_key(bus.kv, latest_key(trainer), Latest)


async def check_stream(bus: Log, *, cursor: int, oldest_needed: int, identity: str, cursor_s: float = 0.0) -> str:
    """Return the sample stream's identity if a reader may go on from `cursor`, whose record was stored at `cursor_s` (0.0: not known).

    Raises:
        LogTruncated: it is another stream, lost its end (power loss), or was trimmed above what is needed.
    """
    state = await bus.state(SAMPLES)
    if identity and identity != state.identity:
        raise LogTruncated(
            f"expected sample stream {identity}, got {state.identity}: it was deleted and made again",
            hint="restore the bus's storage, or begin a new run with --name",
        )
    another = state.last >= cursor and await is_another(bus, SAMPLES, cursor, cursor_s)
    if state.last < cursor or another:
        ends = "has lost its end and grown again" if another else f"ends at sequence {state.last}"
        raise LogTruncated(
            f"the sample stream {ends}, the checkpoint has read up to {cursor}",
            hint="the bus lost messages (power loss?); restore its storage or begin a new run; `bus.sync_always = true` prevents it",
            needed=cursor,
            first=state.first,
        )
    if state.first > oldest_needed:
        raise LogTruncated(
            f"sequence {oldest_needed} of the sample stream is needed, it begins at {state.first}",
            hint="was it trimmed by hand, or made with discard=old? a replay from the start needs the whole stream",
            needed=oldest_needed,
            first=state.first,
        )
    return state.identity


async def point_to(bus: Bus, kept: tuple[Latest, ...], *, lease_s: int | None = None) -> None:
    """Name complete checkpoints of a trainer, the newest first, as those to go on from; then hold the stream for the oldest of them."""
    newest = kept[0]
    named = replace(newest, older=tuple(replace(one, older=UNSET) for one in kept[1:]))
    await bus.kv.put(latest_key(newest.trainer), encode(named))
    carried = tuple(sorted(set(carried_tasks(kept).values())))
    await hold(bus, newest.trainer, min(one.oldest_needed for one in kept), kept[-1].version, lease_s=lease_s, carried=carried)


def carried_tasks(kept: Iterable[Latest]) -> dict[int, int]:
    """Task of each message that checkpoints hold themselves, by sequence."""
    found: dict[int, int] = {}
    for one in kept:
        tasks = () if isinstance(one.carried_tasks, UnsetType) else one.carried_tasks
        found |= dict(zip(one.carried, tasks, strict=False))  # an earlier build told none
    return found


async def hold(
    bus: Bus, reader: str, oldest_needed: int, version: Version, *, lease_s: int | None = None, carried: tuple[int, ...] = ()
) -> None:
    """Put a reader's position: nothing from `oldest_needed` on may be trimmed, nor what samples of the tasks `carried` name."""
    position = Position(reader, SAMPLES, oldest_needed, version, carried or UNSET)
    await bus.kv.put(PREFIX_POSITIONS + reader, encode(position), ttl_s=lease_s)


async def ensure_position(bus: Bus, trainer: str, state: Resumable, *, lease_s: int | None = None) -> None:
    """Claim the stream from this reader's oldest needed message on, if it has no position yet."""
    if await bus.kv.get(PREFIX_POSITIONS + trainer) is None:
        await hold(bus, trainer, state.oldest_needed, state.version, lease_s=lease_s)
