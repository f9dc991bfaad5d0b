"""The log of a run for its page: ledger and events go into the index, and single entries are fetched when somebody looks at them.

While the run is up its bus is read with the reader's login, which can store nothing: for as long as somebody looks at the page, and else
now and then. Of a run that is over the server is started on the run's store for as long as it is read or fetched from, and stopped a
while later, so that `up` can have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping

import msgspec

from streamrl.bus.permissions import READER
from streamrl.bus.protocol import Bus, Message
from streamrl.errors import BusError, ConfigError, LaunchError, LogTruncated, NotFound, SchemaError, StreamRLError
from streamrl.monitor.failures import Pace
from streamrl.monitor.numbers import Finding
from streamrl.monitor.slo import findings_of
from streamrl.page.attention import Attention
from streamrl.page.index import COMMITS, LEDGER_TABLE, Index
from streamrl.runtime.lock import holder
from streamrl.runtime.retries import pause_s
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.codec import decode
from streamrl.schemas.events import FAILURES_EVENT, MOVING_EVENT, NOTICE_EVENT, SLO_EVENT, STANDING_EVENT, Event
from streamrl.schemas.subjects import EVENTS, LEDGER, Subjects, source_of
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

_RETRY_S, _MOST_RETRY_S = 2.0, 30.0
_REST_S = 120.0
"""So long at most it lies behind a run that is up and that nobody looks at."""
_LOOK_S = 10.0
_COMMIT_S = 2.0
_IDLE_S = 20.0
"""So long after the last look the server of a run that is over is stopped."""
_ANSWER_S = 15.0
"""Somebody who looks waits at most this long for the bus."""
_AGAIN_S = 1.0
"""Between two tries at least, however often somebody asks."""
_MOST_NOTES = 100
_LOOK_BACK = 2000
"""Events at the end that are read for their notices."""
_CHARS = 1000
_COMMIT_EVERY = 500
"""Messages."""


class _LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    version: Version
    digest: str = ""
    num_samples: int = 0
    num_tokens: int = 0
    time_s: float = 0.0
    gap: msgspec.Raw | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a worker or the supervisor has said."""

    time_s: float
    worker: str
    kind: str
    text: str


class RunLog:
    """Reads a run's log for as long as `follow` runs.

    Args:
        run: its directory.
        index: gets what is read.
        trainer: whose ledger.
        attention: whether somebody looks.
    """

    def __init__(self, run: RunDir, index: Index, trainer: str, attention: Attention) -> None:
        self.notes: deque[Note] = deque(maxlen=_MOST_NOTES)
        self.findings: tuple[Finding, ...] | None = None
        """Objectives that are not met, as the supervisor has said last; None: it has said nothing."""
        self.trouble = ""
        """Why the log cannot be read now."""
        self.read_once = False
        """Whether ledger and events have been read to where they ended at the start."""
        self._judged = 0
        self._at: dict[str, int] = {}
        """By stream, the newest message that was read."""
        self.run = run
        """The run that the log is of."""
        self._index = index
        self._trainer = trainer
        self._attention = attention
        self._bus: Bus | None = None
        self._there = asyncio.Event()
        self._fetched_s = -math.inf
        self._read_s, self._read_live = -math.inf, False
        self._pace = Pace()

    async def follow(self) -> None:
        """Read until cancelled. Whatever the bus does, it is tried again."""
        failures = 0
        while True:
            live = self._is_up()
            if self._due(live=live):
                try:
                    async with self._opened(live=live) as bus:
                        failures = 0
                        await self._read_all(bus, live=live)
                except* (StreamRLError, OSError) as errors:
                    failures += 1
                    self._said(errors)
            await self._attention.wait(pause_s(failures, first_s=_RETRY_S, most_s=_MOST_RETRY_S) if failures else _LOOK_S)
            if failures:
                await asyncio.sleep(_AGAIN_S)

    def _due(self, *, live: bool) -> bool:
        """Whether the log is to be read now."""
        if not self.read_once or self._wanted:
            return True
        if self._attention.there:
            return live or self._read_live  # of a run that has ended since, the end
        return live and time.monotonic() - self._read_s > _REST_S

    @property
    def _wanted(self) -> bool:
        return time.monotonic() - self._fetched_s < _IDLE_S

    async def bus(self) -> Bus:
        """The log, to fetch something from; raises BusError when it is not there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while self._bus is None:  # it may be let go of between the call that woke this one and now
                    self._fetched_s = time.monotonic()
                    self._attention.seen()
                    await self._there.wait()
        self._fetched_s = time.monotonic()
        if self._bus is None:
            raise BusError(f"the log of run {self.run.name!r} cannot be read now: {self.trouble or 'its server does not answer'}")
        return self._bus

    def _is_up(self) -> bool:
        return holder(self.run) is not None or bool(self.run.load_config().bus.url)

    @contextlib.asynccontextmanager
    async def _opened(self, *, live: bool) -> AsyncGenerator[Bus]:
        opening = connected(self.run, role=READER, name="page", patience_s=_RETRY_S, gather=True) if live else open_bus(self.run)
        async with opening as bus:
            self._bus, self.trouble = bus, ""
            self._there.set()
            try:
                yield bus
            finally:
                self._bus = None
                self._there.clear()

    async def _read_all(self, bus: Bus, *, live: bool) -> None:
        # It may stand far before what is read of the events.
        if (newest := await bus.last(Subjects(self.run.name).events(SLO_EVENT))) is not None:
            with contextlib.suppress(SchemaError):
                self._event(newest, new=False)
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(self._read(bus, LEDGER)), tasks.create_task(self._read(bus, EVENTS))]
            ends = {stream: (await bus.state(stream)).last for stream in (LEDGER, EVENTS)}
            while any(self._at.get(stream, -1) < end for stream, end in ends.items()):  # noqa: ASYNC110 - what reads it has other ends
                await asyncio.sleep(0.1)
            self._index.commit()
            self.read_once = True
            while self._wanted or (live and self._attention.there):
                await asyncio.sleep(_COMMIT_S)
                self._index.commit()
                if live and not self._is_up():
                    break
            self._read_s, self._read_live = time.monotonic(), live
            for reader in readers:
                reader.cancel()

    async def _read(self, bus: Bus, stream: str) -> None:
        state = await bus.state(stream)
        if self._index.mark(stream) > state.last:  # it was made anew, or has lost its end
            self._index.forget(LEDGER_TABLE if stream == LEDGER else COMMITS, source=stream)
            if stream == EVENTS:
                self._judged = 0
            self._at.pop(stream, None)
        known = self._index.mark(stream)
        after = known if stream == LEDGER else min(known, max(0, state.last - _LOOK_BACK))
        after = max(after, state.first - 1, self._at.get(stream, 0))
        self._at[stream] = after
        self._index.reach(stream, max(known, after))
        count = 0
        while True:
            try:
                async for message in bus.read(stream, after=after):
                    after = message.sequence
                    try:
                        (self._ledger if stream == LEDGER else self._event)(message, new=after > known)
                    except SchemaError as error:
                        logger.warning("event=unreadable stream=%s seq=%d error=%s", stream, after, error.message)
                    self._at[stream] = after
                    if after > known:
                        self._index.reach(stream, after)
                    count += 1
                    if count % _COMMIT_EVERY == 0:
                        self._index.commit()
                        await asyncio.sleep(0)
            except LogTruncated:
                after = max(after, (await bus.state(stream)).first - 1)

    def _ledger(self, message: Message, *, new: bool) -> None:
        if not new or source_of(message.subject) != self._trainer:
            return
        line = decode(message.body, _LedgerLine, where=f"{message.subject} {message.sequence}")
        if line.gap is not None:
            return
        row = {**_version(line.version), **_digest(line.digest), "time_s": line.time_s, "sequence": float(message.sequence)}
        row |= {"samples": float(line.num_samples), "tokens": float(line.num_tokens)}
        self._index.add(LEDGER_TABLE, row, source=LEDGER, mark=message.sequence, forks=True)

    def _event(self, message: Message, *, new: bool) -> None:
        event = decode(message.body, Event, where=f"{message.subject} {message.sequence}")
        detail = event.detail
        if event.kind == SLO_EVENT:
            if message.sequence >= self._judged:
                self.findings, self._judged = findings_of(event), message.sequence
        elif event.kind == "weights" and "error" not in detail:
            if new:
                self._commit(event, message.sequence)
        elif event.kind in (NOTICE_EVENT, STANDING_EVENT, FAILURES_EVENT, MOVING_EVENT, "weights", "finished"):
            words = {"notice": "text", "standing": "what", "failures": "newest", "weights": "error"}.get(event.kind, "")
            text = str(detail.get(words, ""))[:_CHARS]
            if text or event.kind == "finished":
                self.notes.append(Note(time_s=event.time_s, worker=event.worker, kind=event.kind, text=text))

    def _commit(self, event: Event, sequence: int) -> None:
        detail = event.detail
        row = {**_version(Version.parse(str(detail.get("version", "")))), **_digest(str(detail.get("digest", "")))}
        row |= {name: float(value) for name in ("lag_s", "stage_s", "commit_ms") if isinstance(value := detail.get(name), int | float)}
        try:
            self._index.add(COMMITS + event.worker, row | {"time_s": event.time_s}, source=EVENTS, mark=sequence)
        except ValueError as error:
            raise SchemaError(f"expected the name of a worker: {error}") from error

    def _said(self, errors: BaseExceptionGroup) -> None:
        error = errors.exceptions[0]
        self.trouble = error.message if isinstance(error, BusError | ConfigError | LaunchError) else str(error)
        if self._pace.due(time.monotonic()):
            logger.warning("event=log_not_read error=%s", self.trouble)


class ParentLog(RunLog):
    """The log of the run that a branch was trained from: nothing of it goes into the branch's index, and single messages are fetched."""

    async def bus(self) -> Bus:
        """See `RunLog.bus`; raises NotFound where the parent has gone."""
        if not self.run.config_path.is_file():
            raise NotFound(
                f"expected run {self.run.name!r}, whose samples these are, in {self.run.path.parent}, got nothing", hint="was it moved?"
            )
        return await super().bus()

    def _is_up(self) -> bool:
        try:
            return self.run.config_path.is_file() and super()._is_up()
        except ConfigError:  # of another version, or it goes just now; said when a sample is wanted
            return False

    def _due(self, *, live: bool) -> bool:
        return self._wanted

    async def _read_all(self, bus: Bus, *, live: bool) -> None:
        while self._wanted:
            await asyncio.sleep(_COMMIT_S)
            if live and not self._is_up():
                break


def _version(version: Version) -> Mapping[str, float]:
    return {"version": float(version.number), "epoch": float(version.epoch)}


def _digest(digest: str) -> Mapping[str, float]:
    """64 bits in two numbers that hold 32 exactly."""
    try:
        bits = int(digest, 16)
    except ValueError:
        return {}
    return {"digest_high": float(bits >> 32 & 0xFFFFFFFF), "digest_low": float(bits & 0xFFFFFFFF)}
