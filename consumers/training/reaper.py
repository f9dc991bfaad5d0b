"""Ends tasks that nobody holds, so that their credits come back: a lost tail of the sample stream, an acknowledgement without a record.

```text
issued    the end of `tasks`; of the fold's open tasks below it
gone      those whose message is no longer in `tasks`
end       the end of `samples`, read after that: a producer stores its records before it takes a task off the queue
          the training thread folds past `end`
lost      what of the gone is still open: a tombstone with the message id `lost-<task>`
```

In the same way a rollout is ended that waits for a reward where the request for it is no longer in `grading`: a rewarder stores its answers
before it takes a request off the queue, so what is unanswered behind the end is never answered.

Every look may be cut short anywhere, and is made again: a tombstone is stored once, and one that came behind a real record would be a
`late` drop. A run that has trained its last version is looked at once more, by whoever trained it: what came since its last record is
folded for that look only. A task that somebody holds is in `tasks`, however long it is held: what hangs is ended by its holder's limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import is_gone, stretch
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.trimming import trim_if_full
from streamrl.core.fold import fold
from streamrl.core.state import FoldConfig, FoldState
from streamrl.errors import BusError, Fenced, StreamFull
from streamrl.runtime.task_keys import remove_task_keys
from streamrl.schemas.codec import encode
from streamrl.schemas.digests import body_digest
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import (
    GRADING,
    HEADER_DIGEST,
    HEADER_TASK,
    MAIN_SOURCE,
    PREFIX_FENCES,
    SAMPLES,
    TASKS,
    WARMUP_SOURCE,
    Subjects,
)

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
REST = 10
"""After a look that took long, this many times as long passes before the next one."""
MOST_S = 15.0
"""But no more: a look also waits for the step that the trainer is in."""
TOGETHER = 32
"""Messages that are asked for at a time."""
POLL_S = 0.1
REASON = "lost"
Waiting = tuple[int, int, int]
"""A rollout without a reward: task, rollout, and the request that its samples name."""


class Reaper:
    """Looks at the start and every few seconds, in the bus's loop, beside the training thread.

    Args:
        bus: connected.
        subjects: of the run.
        trainer: whose fence is held.
        fence: under which it looks; once there is a higher one it ends nothing more.
        state: the fold's state as it is now.
        config: the decisions.
    """

    def __init__(self, bus: Bus, subjects: Subjects, trainer: str, fence: int, state: Callable[[], FoldState], config: FoldConfig) -> None:
        self._bus = bus
        self._subjects = subjects
        self._trainer = trainer
        self._fence = fence
        self._state = state
        self._config = config

    def start(self, loop: asyncio.AbstractEventLoop) -> Future[None]:
        """Look again and again until the future is cancelled; called from the training thread."""
        running = asyncio.run_coroutine_threadsafe(self._run(), loop)
        running.add_done_callback(_say_why)
        return running

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except Fenced as error:
                logger.info("event=reaper_done reason=fenced error=%s", error.message)
                return
            except BusError as error:
                logger.warning("event=reaper_failed error=%s", error.message)
            await asyncio.sleep(min(MOST_S, max(LOOK_EVERY_S, REST * (time.monotonic() - began))))

    async def last_look(self) -> None:
        """The look after the run's last version, when nobody folds any more. What the bus refuses then is said and costs no version.

        Raises:
            Fenced: another trainer has taken over.
        """
        try:
            await self.look(over=True)
        except Fenced:
            raise
        except BusError as error:
            logger.warning("event=reaper_failed at=end error=%s", error.message)

    async def look(self, *, over: bool = False) -> tuple[int, ...]:
        """One look; returns the tasks that were ended.

        Args:
            over: the run has trained its last version, and nobody folds any more.

        Raises:
            Fenced: another trainer has taken over; nothing was ended.
            BusError: it will be tried again.
        """
        state = self._state()
        unanswered = await self._unanswered(state)
        queue = await self._bus.state(TASKS)
        suspects = [task for task in range(state.watermark, min(state.granted, queue.last)) if state.is_open(task)]
        gone = [task for task in suspects if task + 1 < queue.first]
        rest = suspects[len(gone) :]
        for begin in range(0, len(rest), TOGETHER):
            some = rest[begin : begin + TOGETHER]
            there = await asyncio.gather(*(self._is_there(task) for task in some))
            gone += [task for task, found in zip(some, there, strict=True) if not found]
        if not gone and not unanswered:
            return ()
        end = (await self._bus.state(SAMPLES)).last
        state = await (self._rest_folded(end) if over else self._folded(end))
        lost = tuple(task for task in gone if state.is_open(task))
        unrewarded = [one for one in unanswered if _waits(state, one)]
        if lost or unrewarded:
            await self._check_fence()
            await self._end(state, lost)
            await self._end_unrewarded(state, unrewarded)
        return lost

    async def _folded(self, end: int) -> FoldState:
        """The state once another thread has folded up to `end`, or all that is left of the stream below it."""
        cursor, since = -1, 0.0
        while (state := self._state()).cursor < end:
            now = time.monotonic()
            if state.cursor != cursor:
                cursor, since = state.cursor, now
            elif now - since >= LOOK_EVERY_S:  # not at once: it is a whole message of samples that comes, and a step takes long
                if await self._lost_end(cursor, end):
                    break
                since = time.monotonic()
            await asyncio.sleep(POLL_S)
        return state

    async def _rest_folded(self, end: int) -> FoldState:
        state = self._state()
        async for message in stretch(self._bus, SAMPLES, first=state.cursor + 1, last=end):
            state, _ = fold(state, open_message(message).record, self._config)
        return state

    async def _lost_end(self, cursor: int, end: int) -> bool:
        """Whether nothing of the stream is left behind `cursor`, so that nobody can read up to its end."""
        found = await self._bus.first_from(SAMPLES, cursor + 1)
        return found is None or found.sequence > end

    async def _is_there(self, task: int) -> bool:
        return not await is_gone(self._bus, TASKS, task + 1)

    async def _unanswered(self, state: FoldState) -> list[Waiting]:
        """Rollouts without a reward whose request is not in the queue: it is below the first that is there, or was never stored."""
        waiting = [
            (task.task, rollout, one.grading)
            for task in state.pending.values()
            for rollout, one in task.rollouts.items()
            if one.grading and one.reward is None
        ]
        if not waiting:
            return []
        queue = await self._bus.state(GRADING)
        return [one for one in waiting if not queue.first <= one[2] <= queue.last]

    async def _check_fence(self) -> None:
        entry = await self._bus.kv.get(PREFIX_FENCES + self._trainer)
        if entry is None or entry.value != str(self._fence).encode():
            raise Fenced(f"trainer {self._trainer!r} with fence {self._fence} ends no tasks: there is another fence", fence=self._fence)

    async def _end_unrewarded(self, state: FoldState, waiting: Sequence[Waiting]) -> None:
        for task, rollout, grading in waiting:
            known = state.pending[task]
            stone = Tombstone(
                task=task,
                reason=REASON,
                rollout=rollout,
                group_size=known.group_size,
                detail="nobody scores it: the request for its reward is not in the queue, and no answer came",
                source=known.source,
                grading=grading,
            )
            await self._store(stone, f"lost-{task}.{rollout}.g{grading}")
            logger.warning("event=reward_lost task=%d rollout=%d grading=%d", task, rollout, grading)

    async def _store(self, stone: Tombstone, id: str) -> None:
        body = encode(stone)
        headers = {HEADER_TASK: str(stone.task), HEADER_DIGEST: body_digest(body)}
        try:
            await self._bus.publish(self._subjects.tombstones(stone.source), body, id=id, headers=headers)
        except StreamFull:
            await trim_if_full(self._bus)
            raise

    async def _end(self, state: FoldState, lost: Sequence[int]) -> None:
        for task in lost:
            known = state.pending.get(task)
            await self._forget(task)
            source = known.source if known is not None else WARMUP_SOURCE if state.in_warmup(task) else MAIN_SOURCE
            detail = "nobody holds it, it is not in the queue, and the stream has no end of it"
            await self._store(Tombstone(task=task, reason=REASON, detail=detail, source=source), f"lost-{task}")
            logger.warning("event=task_lost task=%d source=%s", task, source)

    async def _forget(self, task: int) -> None:
        """Nobody goes on from what is stored of it. First, so that whoever is cut short here looks at the task again."""
        try:
            await remove_task_keys(self._bus.kv, task)
            await self._bus.turns.remove(f"{task}/")
        except BusError as error:  # a credit is worth more than the room of some keys
            logger.warning("event=task_keys_left_behind task=%d error=%s", task, error.message)


def _waits(state: FoldState, waiting: Waiting) -> bool:
    """Whether a rollout still has no reward, and waits for that of the same request."""
    task, rollout, grading = waiting
    known = state.pending.get(task)
    found = known.rollouts.get(rollout) if known is not None else None
    return found is not None and found.reward is None and found.grading == grading


def _say_why(running: Future[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("event=reaper_ended error=%s", error, exc_info=error)
