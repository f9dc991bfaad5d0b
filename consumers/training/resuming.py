"""Where a trainer goes on from: its newest checkpoint, or an older one when that is damaged or the stream does not fit it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Message
from streamrl.bus.reading import first_gone
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.carried import held, oldest_read_again, read_carried
from streamrl.consumers.training.checkpoints import CHECKPOINTS, carried_tasks, check_stream, hold, latest_key, point_to, read_latest
from streamrl.consumers.training.ledger import Ledger
from streamrl.core.state import FoldState
from streamrl.errors import CannotResume, CheckpointDamaged, LogTruncated, SchemaError, StreamRLError
from streamrl.models.directories import list_checkpoints, set_aside
from streamrl.schemas.control import Latest
from streamrl.schemas.subjects import SAMPLES
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import Trainer


class Resumed(msgspec.Struct, frozen=True):
    """What a trainer goes on from."""

    state: FoldState
    latest: Latest | None
    """Its checkpoint; None for the initial weights."""
    carried: dict[int, Message]
    """Messages that the checkpoint carries."""
    identity: str
    """Of the sample stream."""


class Resuming:
    """Looks for the newest checkpoint that can be gone on from.

    Args:
        bus: connected.
        call: runs a coroutine of the bus's loop.
        trainer: the backend, initial weights loaded.
        name: of the trainer.
        run_path: directory of the run.
        initial: the state before the first record.
        ledger: loaded.
        say: tells people.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        call: Caller,
        trainer: Trainer,
        name: str,
        run_path: Path,
        initial: FoldState,
        ledger: Ledger,
        say: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._call = call
        self._trainer = trainer
        self._name = name
        self._run_path = run_path
        self._initial = initial
        self._ledger = ledger
        self._say = say
        self._restored = False
        """Whether the backend's weights may be other than the initial ones."""
        self._stream_lost = False
        """True where the sample stream no longer has what a newer checkpoint has read: the entries after it are lost too."""

    def resume(self) -> Resumed:
        """Load it; the initial weights will do while the stream has its beginning. What is passed over is said.

        Candidates are those that the key `latest` names, then others in the directory, for a run of an earlier build names one only.

        Raises:
            CannotResume: there is none.
            TrainingError: a checkpoint is of another model, or cannot be looked at now.
        """
        latest = self._call(read_latest(self._bus, self._name))
        if latest is None:
            identity = self._call(check_stream(self._bus, cursor=0, oldest_needed=1, identity=""))
            return Resumed(self._initial, None, {}, identity)
        passed: list[StreamRLError] = []
        named = list(latest.kept)
        for place, one in enumerate([*named, *self._unnamed(latest)]):
            if passed:  # whatever it needs, nothing is trimmed from here on
                carried = tuple(sorted(set(carried_tasks(latest.kept).values())))
                self._call(hold(self._bus, self._name, one.oldest_needed, one.version, carried=carried))
            try:
                found, resumed = self._load(one, latest.stream_identity)
            except (CheckpointDamaged, LogTruncated, SchemaError) as error:
                passed.append(error)
                # The ledger's own refusal, and a stream that is another one altogether, name no message.
                self._stream_lost |= isinstance(error, LogTruncated) and error.needed is not None
                self._say(f"checkpoint {_label(one)} cannot be gone on from: {error.message}")
                if not isinstance(error, LogTruncated):
                    set_aside(self._run_path / one.path)
                continue
            found = replace(found, older=tuple(named[place + 1 :]))
            if passed:
                self._call(point_to(self._bus, found.kept))
                self._say(f"goes on from checkpoint {_label(found)}; what came after it is trained again")
            return replace(resumed, latest=found)
        return self._begin_again(latest, passed[0])

    def _load(self, one: Latest, identity: str) -> tuple[Latest, Resumed]:
        """Load a checkpoint; nothing is restored unless ledger and stream have what the key says that it needs."""
        self._check_ledger(one.version)
        self._call(check_stream(self._bus, cursor=one.cursor, oldest_needed=one.oldest_needed, identity=identity))
        path = self._run_path / one.path
        extra = self._trainer.load(path)
        self._restored = True
        state, carried = FoldState.decode(extra), read_carried(path)
        # The files may be newer than the key: a write under the same name was struck before the key was put.
        oldest = oldest_read_again(state, carried)
        stream = check_stream(self._bus, cursor=state.cursor, oldest_needed=oldest, identity=identity, cursor_s=state.cursor_s)
        found = self._call(stream)
        self._check_pending(held(state) - carried.keys())
        return replace(one, cursor=state.cursor, oldest_needed=oldest, older=()), Resumed(state, None, carried, found)

    def _check_pending(self, needed: set[int]) -> None:
        gone = self._call(first_gone(self._bus, SAMPLES, needed))
        if gone is not None:
            raise LogTruncated(
                f"a group that waits in it needs the sample stream's message {gone}, which is gone",
                hint="the bus lost messages (power loss?); `bus.sync_always = true` prevents it",
                needed=gone,
            )

    def _check_ledger(self, version: Version) -> None:
        if not self._stream_lost and not self._ledger.leads_on(version.number):
            raise LogTruncated(
                f"the ledger does not lead from version {version} to {self._ledger.last_number}: entries between them were lost",
                hint="a checkpoint after the gap is needed",
            )

    def _unnamed(self, latest: Latest) -> list[Latest]:
        """Other checkpoints below the newest on the ledger's line; what they need is found out when they are loaded."""
        first = self._call(self._bus.state(SAMPLES)).first
        known = {one.path for one in latest.kept}
        found: list[Latest] = []
        for version, path in reversed(list_checkpoints(self._run_path / CHECKPOINTS, f"{self._name}-")):
            entry, relative = self._ledger.at(version.number), f"{CHECKPOINTS}/{path.name}"
            if version.number < latest.version.number and entry is not None and entry.version == version and relative not in known:
                found.append(Latest(self._name, version, relative, 0, first, latest.stream_identity))
        return found

    def _begin_again(self, latest: Latest, error: StreamRLError) -> Resumed:
        identity = ""
        with contextlib.suppress(LogTruncated):
            self._check_ledger(Version())
            identity = self._call(check_stream(self._bus, cursor=0, oldest_needed=1, identity=latest.stream_identity))
        if not identity or self._restored:
            raise CannotResume(
                f"run {self._run_path.name!r} has no checkpoint that it could go on from: {error.message}",
                hint="put a copy of checkpoints/, or of the whole run directory, back; or begin a new run from a policy in hf/",
            ) from error
        # First: without `latest`, and the position still higher, a start after a kill could trim what it has yet to read.
        self._call(hold(self._bus, self._name, 1, Version()))
        self._call(self._bus.kv.delete(latest_key(self._name)))
        self._say("goes on from the initial weights: all versions are trained again from the log")
        return Resumed(self._initial, None, {}, identity)


def _label(one: Latest) -> str:
    return Path(one.path).name
