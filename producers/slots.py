"""What a producer's slots for tasks spend their time on, and the tokens that their tasks are given.

A slot is free (`wait_credit`), or has one claimed task. With any request open at an engine it is in `generate`, with none that has found an
engine in `wait_engine`, else in the phase of its task: `tools` (a producer's code), `reward`, `publish`, `wait_room`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import aclosing, contextmanager
from contextvars import ContextVar

from streamrl.core.lengths import added, histogram
from streamrl.engines.protocol import Chunk, Engine, EngineInfo, GenerateRequest
from streamrl.telemetry.clock import StateClock

FREE = "wait_credit"
_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


class Slot:
    """One claimed task.

    Args:
        clock: of all slots.
        found: returns once there is an engine to ask.
    """

    def __init__(self, clock: StateClock, found: Callable[[], Awaitable[None]]) -> None:
        self.found = found
        self.heard: list[int] = []
        """Tokens of each completion that its task was given."""
        self.stored: list[int] = []
        """Those of them that lie on the sample stream."""
        self._clock = clock
        self._phase = self._state = FREE
        self._asking = self._waiting = 0

    def asks(self, change: int) -> None:
        """Requests at an engine."""
        self._asking += change
        self._look()

    def waits(self, change: int) -> None:
        """Requests that have no engine."""
        self._waiting += change
        self._look()

    def enter(self, phase: str) -> str:
        """Its task is in another phase; returns the one before."""
        before, self._phase = self._phase, phase
        self._look()
        return before

    def _look(self) -> None:
        state = "generate" if self._asking else "wait_engine" if self._waiting else self._phase
        if state != self._state:
            self._clock.move(self._state, state)
            self._state = state


class Cut:
    """Tokens that engines have given tasks and that were never stored: of rollouts that failed, timed out or were given up."""

    def __init__(self) -> None:
        self._tokens = 0
        self._lengths: tuple[int, ...] = ()

    def add(self, slot: Slot) -> None:
        """A task has left its slot. One that has gone on from a checkpoint may have stored more than it was given here."""
        if slot.heard == slot.stored:
            return
        self._tokens += sum(slot.heard) - sum(slot.stored)
        left = Counter(slot.heard)
        left.subtract(slot.stored)
        self._lengths = added(self._lengths, histogram(length for length in left.elements() if length))

    def take(self) -> tuple[int, tuple[int, ...]]:
        """Tokens, and lengths of completions (`streamrl.core.lengths`), since the last call. A surplus of stored ones is kept back."""
        tokens, lengths = max(0, self._tokens), self._lengths
        self._tokens, self._lengths = self._tokens - tokens, ()
        return tokens, lengths


@contextmanager
def taken(clock: StateClock, found: Callable[[], Awaitable[None]], cut: Cut) -> Generator[Slot]:
    """A slot with a task, also for `phase` in everything that is awaited meanwhile."""
    slot = Slot(clock, found)
    slot.enter("tools")
    token = _current.set(slot)
    try:
        yield slot
    finally:
        _current.reset(token)
        slot.enter(FREE)
        cut.add(slot)


def stored(completions: Iterable[int]) -> None:
    """The task that is worked on has these completions, of so many tokens each, on the stream, where there is a slot for it."""
    if (slot := _current.get()) is not None:
        slot.stored += completions


def phase(name: str) -> _Phase:
    """The task that is worked on is in a phase, where there is a slot for it."""
    return _Phase(name)


class _Phase:
    """A context that costs a third of a generator's."""

    __slots__ = ("_before", "_name", "_slot")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._slot = _current.get()
        if self._slot is not None:
            self._before = self._slot.enter(self._name)

    def __exit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.enter(self._before)


class SlotEngine:
    """An engine as the task of a slot asks it."""

    def __init__(self, engine: Engine, slot: Slot) -> None:
        self._engine = engine
        self._slot = slot

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        slot = self._slot
        slot.waits(+1)
        try:
            await slot.found()
        finally:
            slot.waits(-1)
        slot.asks(+1)
        first = len(slot.heard)
        slot.heard += [0] * len(request.seeds)
        try:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]  # every adapter is an async generator
                async for chunk in chunks:
                    slot.heard[first + chunk.completion] += len(chunk.token_ids)
                    yield chunk
        finally:
            slot.asks(-1)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def info(self) -> EngineInfo:
        return await self._engine.info()


def asked(engine: Engine) -> Engine:
    """The engine for the task that is worked on."""
    slot = _current.get()
    return engine if slot is None else SlotEngine(engine, slot)
