"""A task in the children: its rollouts in one child, what a lost child leaves undone in another, and who is to blame; then its reward.

```text
shared child lost -> what it left goes on in another, from its checkpoints; whoever may have done it runs alone from now on
alone and lost    -> counted (`attempts/<task>`); at tasks.max_deliveries what is left ends as `deliveries`
over a limit      -> the rollout ends as `timeout`, its group goes on
engine failed     -> the rollout is repeated; when engines stay away the task is given back
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from streamrl.engines.protocol import Engine
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.children import frames
from streamrl.producers.children.calls import Call, Images, Recorded
from streamrl.producers.children.child import Child
from streamrl.producers.children.pool import Children
from streamrl.producers.children.saved import pack, unpack
from streamrl.producers.episode import Episode
from streamrl.producers.protocol import Failure
from streamrl.producers.repeats import Repeats
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

TIMEOUT = "timeout"
DELIVERIES = "deliveries"
REPEATED = "an episode has no turn of the model that those before it have not, and would be trained a second time: return each episode once"
_LOSSES = 2
"""Children that a task may lose without being suspected; so a guilty one that was waiting when it struck is found too."""

Store = Callable[[int, bytes], Awaitable[None]]


class Keeping(msgspec.Struct, frozen=True):
    """What the bus keeps of a task while it is worked on; by default nothing."""

    resumes: Mapping[int, bytes] = {}
    """Checkpoints of an earlier delivery by rollout."""
    store: Store | None = None
    """Stores (rollout, data)."""
    attempts: int = 0
    """Children that have died of it alone, in earlier deliveries."""
    died: Callable[[], Awaitable[int]] | None = None
    """Counts one more, and says how many there are now."""
    images: Images | None = None
    """Reads the images of its row; None: it has none."""


NOTHING = Keeping()
"""For tasks that are not on the bus, and have no images."""


class Job:
    """One task in the children. Made by `job`; one method at a time.

    Args:
        children: where it runs.
        task: the task.
        engine: what its rollouts may ask.
        keeping: of the task.
        max_deaths: `tasks.max_deliveries`.
    """

    def __init__(self, children: Children, task: RolloutTask, *, engine: Engine, keeping: Keeping, max_deaths: int) -> None:
        self._children = children
        self._task = task
        self._engine = engine
        self._keeping = keeping
        self._max_deaths = max_deaths
        self._attempts = keeping.attempts
        self._suspect = keeping.attempts > 0
        self._one_by_one = False
        self._losses = 0
        self._saved = dict(keeping.resumes)
        self._seats = AsyncExitStack()
        self._child: Child | None = None
        self._verdict: Failure | None = None
        """What ends the task as a whole."""

    @property
    def scores(self) -> bool:
        """Whether the children have a reward."""
        return self._children.graders is not None

    async def leave(self) -> None:
        """Free its seat."""
        self._child = None
        await self._seats.aclose()

    async def roll_out(self) -> Sequence[Episode | Failure]:
        """The episodes and failures of all rollouts.

        Raises:
            EngineError: engines stay away; the task is to be given back.
            ConfigError: the user's code can no longer be loaded.
        """
        await self._seat()
        keys: list[int | None] = [*range(self._task.num_rollouts)] if self._children.by_rollout else [None]
        results: dict[int | None, Sequence[Episode | Failure]] = {}
        while left := [key for key in keys if key not in results]:
            if self._verdict is not None:
                results.update((key, self._failed(key, self._verdict)) for key in left)
                break
            child = await self._seat()
            begun = left[:1] if self._one_by_one else left
            try:
                async with asyncio.TaskGroup() as group:
                    for key in begun:
                        group.create_task(self._one(child, key, results))
            except* EngineError as error:
                raise error.exceptions[0] from None
            if any(key not in results for key in begun):
                await self._lost(child)
        return [item for key in keys for item in results[key]]

    async def score(self, episodes: Sequence[Episode]) -> Sequence[RewardValue | Exception] | Failure:
        """One value for each episode (a TimeoutError: its grader was over its limit), or what ends all of them.

        Raises:
            ConfigError: the user's code can no longer be loaded.
        """
        graders = self._children.graders
        if graders is None:
            raise ValueError("expected children with a reward")
        await self.leave()
        return await graders.score(self._task, episodes, max_deaths=self._max_deaths)

    async def _seat(self) -> Child:
        if self._child is None or self._child.lost or (self._suspect and not self._child.alone):
            await self.leave()
            self._child = await self._seats.enter_async_context(self._children.seat(alone=self._suspect))
        return self._child

    async def _one(self, child: Child, key: int | None, results: dict[int | None, Sequence[Episode | Failure]]) -> None:
        repeats = Repeats(self._task.index, key)
        while not child.lost:
            resumes, turns = self._resumes(key)

            def make(number: int, turns: Sequence[Recorded] = turns) -> Call:
                store = self._store if self._keeping.store is not None else None
                limits, task = self._children.limits, self._task.index
                images = self._keeping.images
                count = self._task.num_rollouts if key is None else 1
                engine, send = self._engine, child.send
                return Call(
                    number,
                    limits,
                    task=task,
                    engine=engine,
                    send=send,
                    store=store,
                    turns=turns,
                    images=images,
                    rollouts=count,
                    min_version=self._task.min_version,
                )

            begun = tuple(turn.part(0, len(turn.token_ids)) for turn in turns)
            call = child.begin(
                make,
                lambda call, begun=begun, resumes=resumes: frames.RollOut(self._task, (frames.Begin(call.number, key, resumes, begun),)),
            )
            given = await child.wait(call)
            if given == Call.TIMEOUT:
                results[key] = self._failed(key, Failure(0, TIMEOUT, f"{call.expired}{_in(child)}"))
            elif isinstance(given, frames.Ended) and given.problem is None:
                results[key] = _given(call, given)
            elif isinstance(given, frames.Ended) and given.problem is not None:
                error = given.problem.error()
                if await repeats.again(error):
                    continue
                results[key] = self._failed(key, Failure(0, "failed", f"engine: {error.message}"))
            else:
                self._suspect |= call.suspect
            return

    def _failed(self, key: int | None, failure: Failure) -> Sequence[Failure]:
        rollouts = range(self._task.num_rollouts) if key is None else [key]
        return [msgspec.structs.replace(failure, rollout=rollout) for rollout in rollouts]

    async def _lost(self, child: Child) -> None:
        """Decide how what is left goes on."""
        self._one_by_one |= child.unclear
        if not child.alone:
            self._losses += 1
            self._suspect |= self._losses >= _LOSSES
            return
        if child.killed:  # for a limit, which has ended what was over it
            return
        self._attempts += 1
        if self._keeping.died is not None:
            self._attempts = max(self._attempts, await self._keeping.died())
        logger.warning("event=task_killed_its_child task=%d times=%d reason=%r", self._task.index, self._attempts, child.lost)
        if self._attempts >= self._max_deaths:
            detail = f"the process that ran it alone died {self._attempts} times, of which the last: {child.lost}"
            self._verdict = Failure(0, DELIVERIES, detail)

    def _resumes(self, key: int | None) -> tuple[dict[int, bytes], list[Recorded]]:
        """The checkpoints for a call, and the turns that were recorded with them: each once, as those of a group's rollouts share them."""
        found: dict[int, tuple[bytes, list[Recorded]]] = {}
        for rollout, data in self._saved.items():
            if key is None or rollout == key:
                try:
                    found[rollout] = unpack(data)
                except SchemaError as error:
                    logger.warning("event=checkpoint_unreadable task=%d rollout=%d error=%s", self._task.index, rollout, error.message)
        distinct = {turn.key(): turn for _, turns in found.values() for turn in turns}
        return {rollout: data for rollout, (data, _) in found.items()}, list(distinct.values())

    async def _store(self, rollout: int, data: bytes, turns: Sequence[Recorded]) -> None:
        if self._keeping.store is not None:
            packed = pack(data, turns)
            await self._keeping.store(rollout, packed)
            self._saved[rollout] = packed


def _given(call: Call, ended: frames.Ended) -> Sequence[Episode | Failure]:
    given: list[Episode | Failure] = [*ended.failures]
    repeated = call.repeated(ended.given)
    for index, returned in enumerate(ended.given):
        if index in repeated:
            given.append(Failure(returned.rollout, "failed", REPEATED))
            continue
        try:
            given.append(call.episode(returned))
        except SchemaError as error:
            given.append(Failure(returned.rollout, "failed", error.message))
    return given


def _in(child: Child) -> str:
    return f"; {child.lost}" if child.lost else ""


@asynccontextmanager
async def job(children: Children, task: RolloutTask, *, engine: Engine, keeping: Keeping, max_deaths: int) -> AsyncGenerator[Job]:
    """A task in the children, its seat freed at the end."""
    made = Job(children, task, engine=engine, keeping=keeping, max_deaths=max_deaths)
    try:
        yield made
    finally:
        await made.leave()
