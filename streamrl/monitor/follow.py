"""Follows a run on its bus and keeps a RunView up to date; reads no samples."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from streamrl.bus.protocol import Bus, Message
from streamrl.bus.reading import read_key
from streamrl.errors import BusError, Forbidden, LogTruncated, NotFound, SchemaError
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.rates import Totals
from streamrl.monitor.series import Row
from streamrl.monitor.view import RunView
from streamrl.runtime.run_end import read_fence, watch_end
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import MOVING_EVENT, NOTICE_EVENT, SLO_EVENT, STANDING_EVENT, Event, MetricReport
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import (
    EVENTS,
    GRADING,
    KEY_GRANTED,
    LEDGER,
    MAIN_SOURCE,
    METRICS,
    PREFIX_PRESENCE,
    SAMPLES,
    TASKS,
    WARMUP_SOURCE,
    Subjects,
    source_of,
)

logger = logging.getLogger(__name__)

KEY_TOTALS = "totals"
_ENGINES = f"{PREFIX_PRESENCE}engines/"
_WORKERS = f"{PREFIX_PRESENCE}workers/"
_POLL_S = 1.0
_LOOK_BACK = 5000
"""Messages of the sample stream in which a look from outside finds what has failed lately."""
_RETRY_S = 1.0
_ROWS_AT_ONCE = 256
_LOOK_S = 0.02
_MOST_UNSTORED = 8
_PATIENCE_S = 10.0
"""So long in all may reading a long ledger wait for whoever writes its rows."""


class RowTaker(Protocol):
    """Who takes rows; it must not wait."""

    @property
    def has_room(self) -> bool: ...
    def offer(self, rows: Sequence[Row]) -> None: ...


class Follower:
    """Tasks that read ledger, events, metrics, presence and the sample stream's state into `view`.

    Use as an async context manager. Errors of the bus are logged and retried: a view must not end a run.

    Args:
        bus: connected.
        view: brought up to date.
        started_s: when this session of the run began, on the monotonic clock; now if None.
        trainer: whose ledger; those of taps are not the run's.
        carry_totals: store the totals every few seconds (the supervisor does; a look from outside must not).
        rows: gets the rows of the view's series, about every second and at the end.
        after: reports behind this sequence are this session's; those that come from now on if None.
    """

    def __init__(
        self,
        bus: Bus,
        view: RunView,
        *,
        started_s: float | None = None,
        trainer: str = "main",
        carry_totals: bool = False,
        rows: RowTaker | None = None,
        after: int | None = None,
    ) -> None:
        self.view = view
        self._bus = bus
        self._trainer = trainer
        self._carry_totals = carry_totals
        self._rows = rows
        self._reports_after = after
        self._patience_s = _PATIENCE_S
        self._after = {LEDGER: 0, EVENTS: 0, METRICS: 0}
        self._subjects = Subjects(view.run)
        self._tasks: list[asyncio.Task[None]] = []
        self._started_s = time.monotonic() if started_s is None else started_s
        self._history_ends = dict.fromkeys(self._after, 0)
        self._folded = asyncio.Event()
        self._ledger_known = asyncio.Event()
        """Set once the ledger has been read to where it ended at the start."""
        self._void: dict[int, int] = {}
        """By the sequence of a ledger entry that forks the epoch far back: versions from this number on before it are void."""
        self._has_grading = True
        self.answered_s = time.monotonic()
        """When the bus answered last, on the monotonic clock."""
        self.unstored: tuple[BusError, ...] = ()
        """Why the bus, which answers, has not stored the totals the last times, one after another; empty: it has."""

    async def __aenter__(self) -> Follower:
        # Reports of earlier sessions would spoil the folded metrics; the ledger and the events are history worth having.
        self._history_ends = {stream: (await self._bus.state(stream)).last for stream in self._after}
        self._after[METRICS] = self._history_ends[METRICS] if self._reports_after is None else self._reports_after
        folds: dict[str, Callable[[Message], None]] = {LEDGER: self._ledger, EVENTS: self._event, METRICS: self._metric}
        self.view.live = False
        self._look_at_history()
        self._tasks = [asyncio.create_task(self._read(stream, fold)) for stream, fold in folds.items()]
        # A supervisor judges its own session; who looks from outside wants to know of the time before.
        samples = await self._bus.state(SAMPLES)
        first = samples.last if self._carry_totals else max(samples.first - 1, samples.last - _LOOK_BACK, 0)
        for source in (MAIN_SOURCE, WARMUP_SOURCE):
            subject = self._subjects.tombstones(source)
            self._after[subject] = first
            self._tasks.append(asyncio.create_task(self._read(SAMPLES, self._tombstone, subject=subject)))
        # The end that a session before has come to is not this one's; who looks from outside is told of it.
        after = await read_fence(self._bus, self._trainer) if self._carry_totals else 0
        self._tasks.append(asyncio.create_task(self._watch_end(after)))
        self._tasks.append(asyncio.create_task(self._watch()))
        self._tasks.append(asyncio.create_task(self._poll()))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._rows is not None:
            self._rows.offer(self.view.take_rows(time.time(), end=True))

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run in seconds, earlier sessions included."""
        return self.view.before.wall_s + time.monotonic() - self._started_s

    async def catch_up(self, *, within_s: float = 10.0) -> None:
        """Return once every ledger entry, event and report that there is now has been folded, or after `within_s`."""
        ends = {stream: (await self._bus.state(stream)).last for stream in (LEDGER, EVENTS, METRICS)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(self._after[stream] < end for stream, end in ends.items()):
                    self._folded.clear()
                    await self._folded.wait()

    async def store_totals(self) -> None:
        """Keep the counts that no stream holds for the next session of this run."""
        await self._bus.kv.put(KEY_TOTALS, encode(self.view.totals(wall_s=self.elapsed_s)))

    async def _read(self, stream: str, fold: Callable[[Message], None], *, subject: str | None = None) -> None:
        key = subject or stream
        gone = False
        if stream == EVENTS:
            await self._ledger_known.wait()  # which evaluations are worth keeping, the ledger says
        while True:
            try:
                if gone:
                    first = (await self._bus.state(stream)).first
                    logger.info("event=history_trimmed stream=%s first=%d after=%d", stream, first, self._after[key])
                    self._after[key], gone = first - 1, False
                    self._look_at_history()
                async for message in self._bus.read(stream, after=self._after[key], subject=subject):
                    try:
                        fold(message)
                    except SchemaError as error:
                        logger.warning("event=unreadable stream=%s seq=%d error=%s", stream, message.sequence, error.message)
                    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # one message costs no view
                        logger.error("event=not_folded stream=%s seq=%d", stream, message.sequence, exc_info=error)
                    self._after[key] = message.sequence
                    self._look_at_history()
                    self._folded.set()
                    if stream == LEDGER:
                        await self._hand_out_history()
            except _ReadAnew:
                self._after[key] = 0
            except LogTruncated:
                gone = True
            except BusError as error:
                logger.warning("event=follow_retry stream=%s error=%s", stream, error.message)
                await asyncio.sleep(_RETRY_S)

    def _ledger(self, message: Message) -> None:
        if source_of(message.subject) != self._trainer:
            return
        line = decode(message.body, LedgerLine, where=f"{message.subject} {message.sequence}")
        number = line.version.number
        if any(message.sequence < fork and number >= first for fork, first in self._void.items()):
            return
        if not self.view.ledger(line):
            logger.info("event=ledger_read_anew version=%s seq=%d", line.version, message.sequence)
            self._void[message.sequence] = number + (line.gap is not None)
            self._history_ends[LEDGER] = max(self._history_ends[LEDGER], message.sequence)
            self.view.forget_ledger()
            raise _ReadAnew

    def _look_at_history(self) -> None:
        if self._after[LEDGER] >= self._history_ends[LEDGER]:
            self.view.live = True
            self._ledger_known.set()

    async def _hand_out_history(self) -> None:
        """While a long ledger is read, its rows are handed out as they are made, and whoever writes them is waited for; not for long."""
        if self._rows is None or self.view.series is None or self.view.series.num_waiting < _ROWS_AT_ONCE:
            return
        while not self._rows.has_room and not self._ledger_known.is_set() and self._patience_s > 0:
            self._patience_s -= _LOOK_S
            await asyncio.sleep(_LOOK_S)
        self._rows.offer(self.view.take_rows(time.time()))

    def _event(self, message: Message) -> None:
        event = decode(message.body, Event, where=f"{message.subject} {message.sequence}")
        if self._carry_totals and event.kind in (STANDING_EVENT, MOVING_EVENT):
            return  # the supervisor's own words, which its view has at once
        live = message.sequence > self._history_ends[EVENTS]
        if self._carry_totals and live and event.kind == SLO_EVENT:
            return
        if live or event.kind != NOTICE_EVENT:
            self.view.event(event, live=live, sequence=message.sequence)

    def _tombstone(self, message: Message) -> None:
        self.view.tombstone(message.sequence, decode(message.body, Tombstone, where=f"{message.subject} {message.sequence}"))

    def _metric(self, message: Message) -> None:
        self.view.metric(decode(message.body, MetricReport, where=f"{message.subject} {message.sequence}"))

    async def _watch(self) -> None:
        while True:
            try:
                async for entry in self._bus.kv.watch(PREFIX_PRESENCE):
                    self._present(entry.key, entry.value)
            except BusError as error:
                logger.warning("event=watch_retry error=%s", error.message)
                await asyncio.sleep(_RETRY_S)

    async def _watch_end(self, after: int) -> None:
        while True:
            try:
                async for _ in watch_end(self._bus, self._trainer, after=after):
                    self.view.finished = True
            except (BusError, SchemaError) as error:
                logger.warning("event=watch_end_retry error=%s", error.message)
                await asyncio.sleep(_RETRY_S)

    def _present(self, key: str, value: bytes | None) -> None:
        try:
            if key.startswith(_ENGINES):
                self.view.engine(key.removeprefix(_ENGINES), decode(value, EnginePresence, where=key) if value else None)
            elif key.startswith(_WORKERS):
                self.view.worker(key.removeprefix(_WORKERS), decode(value, WorkerPresence, where=key) if value else None)
        except SchemaError as error:
            logger.warning("event=unreadable key=%s error=%s", key, error.message)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # as above
            logger.error("event=not_folded key=%s", key, exc_info=error)

    async def _ungraded(self) -> int:
        """Requests for rewards in their queue; 0 where there is no such queue, or nobody may look: a run from before there was one."""
        if not self._has_grading:
            return 0
        try:
            return (await self._bus.state(GRADING)).messages
        except (NotFound, Forbidden) as error:
            logger.info("event=no_queue_of_requests error=%s", error.message)
            self._has_grading = False
            return 0

    async def _look_at_grant(self) -> None:
        try:
            if (grant := await read_key(self._bus.kv, KEY_GRANTED, Grant)) is not None:
                self.view.grant(grant)
        except SchemaError as error:  # who needs it ends with this error, and says so
            logger.warning("event=unreadable key=%s error=%s", KEY_GRANTED, error.message)

    async def _poll(self) -> None:
        count = 0
        while True:
            try:
                state = await self._bus.state(SAMPLES)
                self.view.stream(last=state.last, num_bytes=state.bytes)
                self.view.issued((await self._bus.state(TASKS)).last, ungraded=await self._ungraded())
                self.answered_s = time.monotonic()
                await self._look_at_grant()
                count += 1
                if self._carry_totals and count % 5 == 0:
                    await self._try_to_store()
            except BusError as error:
                logger.warning("event=poll_retry error=%s", error.message)
            if self._after[LEDGER] >= self._history_ends[LEDGER]:  # reading history is no training
                self.view.mark(time.monotonic())
            if self._rows is not None:
                self._rows.offer(self.view.take_rows(time.time()))
            await asyncio.sleep(_POLL_S)

    async def _try_to_store(self) -> None:
        try:
            await self.store_totals()
        except BusError as error:
            self.unstored = (*self.unstored, error)[-_MOST_UNSTORED:]
            raise
        self.unstored = ()


class _ReadAnew(Exception):
    """The ledger has to be read from its beginning."""


async def read_totals(bus: Bus) -> Totals:
    """What earlier sessions of the run have counted."""
    return await read_key(bus.kv, KEY_TOTALS, Totals) or Totals()
