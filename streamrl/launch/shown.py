"""How an `up` is shown: on its display, in `state.json`, and as events for those who look from outside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.errors import BusError
from streamrl.launch.objectives import Objectives
from streamrl.monitor.failures import Barren, Pace
from streamrl.monitor.follow import Follower
from streamrl.monitor.glance import glance_of, judged, verdict_over, with_verdict
from streamrl.monitor.low_reward import LowReward
from streamrl.monitor.numbers import Glance, WorkerLine
from streamrl.monitor.run_state import RUNNING, RunState, StateFile
from streamrl.monitor.screen import Display, failed_line, one_line, row_line
from streamrl.monitor.slo import detail_of
from streamrl.monitor.untrained import barren_line, since_newest_batch
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import Watch, standing_line
from streamrl.runtime.retries import FailureWindow
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.events import FAILURES_EVENT, MOVING_EVENT, SLO_EVENT, STANDING_EVENT, Event
from streamrl.schemas.subjects import Subjects

logger = logging.getLogger(__name__)

_SHOW_S = 1.0
_BARREN_BATCHES = 8
"""Batches' worth of tasks that may end without a batch before that is worth a word."""
_MOST_FAILURES = 5
"""So often within `_WINDOW_S` may the screen fail and be shown again."""
_WINDOW_S = 60.0


class Shown:
    """One session of a run, as people see it.

    Args:
        config: of the run.
        run: its directory.
        display: shows it.
        gone: called once, when the terminal or the pipe's reader has gone.
    """

    def __init__(self, config: Config, run: RunDir, display: Display, gone: Callable[[], None]) -> None:
        self.draining = False
        """A run that ends is not said to stand."""
        self._config = config
        self._run = run
        self._display = display
        self._gone = gone
        self._unheard = False
        self._state = StateFile(run)
        self._publishing: set[asyncio.Task[None]] = set()
        self._watch, self._failures = Watch(), Pace()
        self._barren = Barren()
        self._rows_told = 0
        self._low_reward = LowReward(run.name, config.tasks.batch_tasks * config.group_size)
        self._objectives: Objectives | None = None

    def note(self, text: str) -> None:
        """A line for people, which the log gets too."""
        logger.info("event=note text=%s", text)
        self._tell(partial(self._display.note, text))

    def page(self, address: str) -> None:
        """Where the page is, which is secret: no log gets it."""
        self._tell(partial(self._display.page, address))

    async def follow(self, bus: Bus, view: RunView, follower: Follower, workers: Callable[[], Mapping[str, WorkerLine]]) -> None:
        """Show `view` until cancelled. What fails in here is said, and it is shown again; not for ever."""
        failures = FailureWindow(_WINDOW_S)
        self._report(bus, MOVING_EVENT, {})  # what the session before may have said last
        self._report(bus, SLO_EVENT, detail_of(()))
        self._objectives = Objectives(self._config, self.note, partial(self._report, bus, SLO_EVENT))
        while True:
            try:
                self._show(bus, view, follower, workers())
            except Exception as error:  # written policy: what only shows a run never ends it, and is never missed in silence
                logger.exception("event=screen_failed")
                last = failures.add(time.monotonic()) > _MOST_FAILURES
                then = "the run goes on unshown, `streamrl status` looks at it" if last else "it is shown again"
                self._note_whatever_comes(f"the screen has failed with {type(error).__name__}: {one_line(str(error))}; {then}")
                if last:
                    return
            await asyncio.sleep(_SHOW_S)

    async def close(self) -> None:
        """Let go of what is still to be published."""
        if self._objectives is not None:
            await asyncio.to_thread(self._objectives.close)
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)

    def write_state(self, state: str, view: RunView, error: str = "") -> None:
        """For those who look at the run directory alone, once the run has ended."""
        numbers = replace(with_verdict(view, view.numbers(elapsed_s=0.0), verdict_over(view)), left_s=None)
        self._write_state(state, view, glance_of(numbers) if view.live else None, error)

    def _write_state(self, state: str, view: RunView, glance: Glance | None, error: str = "") -> None:
        found = RunState(
            state=state,
            step=view.trained.num_reinforced,
            steps=self._config.run.steps,
            error=error,
            lengths=dict(view.lengths.counts),
            length_distance=view.lengths.distance,
            length_cut=view.lengths.knows_cut,
            glance=glance,
        )
        self._state.tell(found, now_s=time.monotonic())

    def _show(self, bus: Bus, view: RunView, follower: Follower, workers: Mapping[str, WorkerLine]) -> None:
        for text in view.take_notices():
            self.note(text)
        numbers = judged(view, self._config, elapsed_s=follower.elapsed_s, supervised=workers)
        now_s = time.monotonic()
        found = self._watch.look(numbers, now_s=now_s, time_s=time.time(), away_s=now_s - follower.answered_s)
        found = None if self.draining else found
        if found != numbers.standing:
            view.standing = found
            if not self.draining:
                self.note(standing_line(found) if found else "the run goes on")
            self._report(bus, STANDING_EVENT if found else MOVING_EVENT, to_builtins(found) if found else {})
        if (failed := view.failures.to_say).num_tasks and self._failures.due(now_s):
            view.failures.said()
            self.note(failed_line(numbers, failed))
            detail = {"tasks": failed.num_tasks, "rollouts": dict(failed.reasons), "newest": numbers.newest_error}
            self._report(bus, FAILURES_EVENT, detail)
        for row in numbers.unusable_rows[self._rows_told :]:
            self.note(row_line(row))
        self._rows_told = len(numbers.unusable_rows)
        if self._objectives is not None:
            self._objectives.look(view, numbers, now_s=now_s, over=self.draining or numbers.phase == "finished")
        self._write_state(RUNNING, view, glance_of(numbers))
        stones = view.failures.all_reasons
        known = bool(since_newest_batch(numbers, stones))
        if self._barren.due(numbers, least=_BARREN_BATCHES * self._config.tasks.batch_tasks, known=known, now_s=now_s):
            self.note(barren_line(numbers, stones))
        if not self._low_reward.over and (low := self._low_reward.look(view.reward_points, numbers.untrained)):
            self.note(low)
        self._tell(partial(self._display.show, numbers, view))

    def _report(self, bus: Bus, kind: str, detail: dict[str, Any]) -> None:
        """Publish an event for those who look from outside; nothing waits for it, for the bus may be what is away."""
        event = Event(kind=kind, worker="supervisor", detail=detail, time_s=time.time())

        async def publish() -> None:
            try:
                await bus.publish(Subjects(self._run.name).events(kind), encode(event))
            except BusError as error:
                logger.warning("event=event_lost kind=%s error=%s", kind, error.message)

        task = asyncio.create_task(publish())
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    def _note_whatever_comes(self, text: str) -> None:
        try:
            self.note(text)
        except Exception as error:  # it may be the notes that fail
            logger.warning("event=not_shown error=%s", error)

    def _tell(self, say: Callable[[], None]) -> None:
        """Show something; once the terminal or the pipe's reader is gone, the run drains in silence."""
        if self._unheard:
            return
        try:
            say()
        except OSError as error:
            self._unheard = True
            logger.warning("event=display_gone error=%s", error)
            self._gone()
