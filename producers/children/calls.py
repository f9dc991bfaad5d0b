"""The parent's side of one call of user code: what its engine requests gave is recorded here, and its time is counted here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import aclosing

import msgspec

from streamrl.engines.extras import BEGAN, CANDIDATES, EXPERTS, INEXACT, counters_of
from streamrl.engines.protocol import Chunk, Engine
from streamrl.errors import EngineError, NotFound, SchemaError
from streamrl.producers.children.frames import Abort, Answer, Ask, Given, Info, Look, Problem, Returned, Save, Told
from streamrl.producers.episode import Episode, Origin, Segment
from streamrl.schemas.candidates import Candidates
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.samples import LogprobMode, VersionSpan

logger = logging.getLogger(__name__)

NO_TOKENS = Segment(())
_MAX_TOKEN = 2**31
_HUNG_SHARE = 1 / 3
"""Of `Limits.idle_s`: a call that has had so much of it without progress is said to hang. Limits lie far above what is usual."""


class Recorded:
    """One completion as the engine gave it."""

    def __init__(self, segment: Segment = NO_TOKENS) -> None:
        self.token_ids = list(segment.token_ids)
        self.logprobs = list(segment.logprobs)
        self.spans = list(segment.spans)
        self.inexact = segment.inexact
        self.temperature = segment.temperature
        self.sampling = segment.sampling
        self.origin = segment.origin
        self.experts: RoutedExperts | None = None
        self.candidates: Candidates | None = None
        self.mode = LogprobMode.SAMPLED
        self.engine = ""

    def add(self, chunk: Chunk) -> None:
        """Its next tokens."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.spans += chunk.spans
        self.inexact |= bool(chunk.extras.get(INEXACT))
        self.experts, self.candidates = chunk.extras.get(EXPERTS), chunk.extras.get(CANDIDATES)
        self.mode, self.engine = chunk.logprob_mode, chunk.engine
        asked_s = 0.0 if self.origin is None else self.origin.asked_s
        began_s, counters = chunk.extras.get(BEGAN, 0.0), counters_of(chunk.extras)
        self.origin = Origin(chunk.engine, chunk.finish_reason or "", asked_s, began_s, time.time(), counters)

    def key(self) -> Hashable:
        """Equal for completions of which one says what the other does."""
        return msgspec.structs.replace(self.part(0, len(self.token_ids)), origin=None), self.mode, self.engine

    def part(self, start: int, stop: int, *, beside: bool = False) -> Segment:
        """Tokens `start` to `stop` with the versions that sampled them, and if asked for with where they went and their candidates."""
        spans: list[VersionSpan] = []
        end = 0
        for span in self.spans:
            begin, end = end, end + span.length
            length = min(end, stop) - max(begin, start)
            if length > 0:
                spans.append(VersionSpan(length, span.version))
        kept = tuple(self.token_ids[start:stop]), tuple(self.logprobs[start:stop]), tuple(spans)
        experts = candidates = None
        if beside and self.experts is not None:
            experts = self.experts.first(self.experts.shape[0] - (len(self.token_ids) - stop))
        if beside and self.candidates is not None:
            candidates = self.candidates.part(start, stop)
        return Segment(*kept, self.inexact, self.temperature, self.origin, experts, self.sampling, candidates)


def bare_chunk(chunk: Chunk) -> Chunk:
    """Leave out what is recorded here and no user code reads: experts and candidates."""
    if not chunk.extras.keys() & {EXPERTS, CANDIDATES}:
        return chunk
    kept = {name: value for name, value in chunk.extras.items() if name not in (EXPERTS, CANDIDATES)}
    return msgspec.structs.replace(chunk, extras=kept)


class Limits(msgspec.Struct, frozen=True):
    """Seconds of user code, and of a child that does not answer."""

    idle_s: float
    """Without an engine call begun, streaming or ended."""
    total_s: float
    """Of one call, waiting left out."""
    max_calls: int = 1000
    """Most engine calls of one rollout."""
    max_tokens: int = 1 << 62
    """Most tokens that engines make for one rollout."""
    answer_s: float = 5.0
    """That an event loop may be held, and that a call may take to end once it is cancelled."""
    start_s: float = 300.0
    """To load the user's code."""


Store = Callable[[int, bytes, Sequence[Recorded]], Awaitable[None]]
"""Stores (rollout, data, what the call has recorded)."""
Images = Callable[[int], Awaitable[bytes]]
"""Reads an image of the task's row by its place."""


class Call:
    """A call that runs in a child. Its `done` becomes what the child said at the end, None when the child was lost, TIMEOUT beyond a limit.

    Args:
        number: of the call.
        task: index of its task.
        limits: of its time.
        engine: what it may ask; None: nothing (a reward).
        send: to its child.
        store: for its checkpoints; None: they are not kept.
        turns: recorded in a child before this one.
        images: of the task's row; None: there are none.
        rollouts: how many it makes.
        min_version: of its task; a request for a newer one might wait for ever, and no clock runs meanwhile.
    """

    TIMEOUT = "timeout"

    def __init__(
        self,
        number: int,
        limits: Limits,
        *,
        task: int,
        engine: Engine | None,
        send: Callable[[Told], None],
        store: Store | None = None,
        turns: Sequence[Recorded] = (),
        images: Images | None = None,
        rollouts: int = 1,
        min_version: int = 0,
    ) -> None:
        self.number = number
        self.task = task
        self.done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.turns = dict(enumerate(turns))
        self.began = False
        """Whether its user code runs: plain functions may wait for a thread."""
        self.expired = ""
        """The limit it has exceeded, in words."""
        self.suspect = False
        """Whether it may be what its child was lost by."""
        self.grace_s = 0.0
        """Since it was cancelled."""
        self._limits = limits
        self._engine = engine
        self._send = send
        self._store = store
        self._images = images
        self._idle_s = 0.0
        self._total_s = 0.0
        self._rollouts = rollouts
        self._min_version = min_version
        self._resumes = bool(turns)
        self._num_asked = len(turns)
        self._num_tokens = sum(len(turn.token_ids) for turn in turns)
        self._waits: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._num_programs = 0
        """That wait for a slot of the sandbox."""

    @property
    def waits(self) -> bool:
        """Whether it waits for engine, version, bus, room or a slot of the sandbox; its clock then stands."""
        return bool(self._waits) or self._num_programs > 0

    @property
    def hung_s(self) -> float:
        """How long its user code has asked no engine, once that is far longer than usual; 0: it gets on, or waits."""
        return self._idle_s if self._idle_s > self._limits.idle_s * _HUNG_SHARE and not self.waits else 0.0

    @property
    def spent_s(self) -> float:
        """Seconds that its user code has had."""
        return self._total_s

    def tick(self, seconds: float) -> bool:
        """Count time that its user code has had; returns whether that takes it over a limit."""
        if self.expired or not self.began:
            return False
        self.expired = self._too_much
        if self.expired or self.waits:
            return bool(self.expired)
        self._idle_s += seconds
        self._total_s += seconds
        if self._idle_s > self._limits.idle_s:
            self.expired = f"{self._limits.idle_s:g} s without an engine call"
        elif self._total_s > self._limits.total_s:
            self.expired = f"{self._limits.total_s:g} s of user code{'' if self._engine is not None else ' (reward.timeout_s)'}"
        return bool(self.expired)

    @property
    def _too_much(self) -> str:
        """The limit of what it may ask of engines that it has exceeded."""
        if self._num_asked > self._limits.max_calls * self._rollouts:
            return f"{self._num_asked} engine calls (producer.max_calls)"
        if self._num_tokens > self._limits.max_tokens * self._rollouts:
            return f"{self._num_tokens} tokens that engines have made for it (producer.max_tokens)"
        return ""

    def end(self, result: object) -> None:
        """It is over, and asks nothing any more."""
        for wait in self._waits.values():
            wait.cancel()
        if not self.done.done():
            self.done.set_result(self.TIMEOUT if self.expired else result)

    def ask(self, frame: Ask | Save | Abort | Info | Look) -> None:
        """Do what user code asks for, and answer it."""
        if isinstance(frame, Ask):
            key, work = ("turn", frame.turn), self._generate(frame)
        else:
            key, work = ("question", frame.number), self._answer(frame)
        task = self._waits[key] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._waited(key, task))

    def wait_for_slot(self, begins: bool) -> None:
        """A program of it waits for a slot, or no longer. That is no progress: its clock goes on where it stood."""
        self._num_programs += 1 if begins else -1

    def hush(self, turn: int) -> None:
        """End a request early."""
        if wait := self._waits.get(("turn", turn)):
            wait.cancel()

    def _waited(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        self._waits.pop(key, None)
        self._idle_s = 0.0
        if not task.cancelled() and (error := task.exception()) is not None and not self.done.done():
            self.done.set_exception(error)

    async def _generate(self, frame: Ask) -> None:
        turns = range(frame.turn, frame.turn + len(frame.request.seeds))
        try:
            if self._engine is None:
                raise EngineError("a reward has no engine to ask", hint="ask engines in the producer")
            if any(turn in self.turns for turn in turns):
                raise EngineError(f"turns {turns} have been asked for before")
            if frame.request.min_version > self._min_version:
                wanted = frame.request.min_version
                raise SchemaError(f"expected a request for version {self._min_version} or older, as its task's, got min_version = {wanted}")
            self._num_asked += 1
            if self._too_much:
                await asyncio.Event().wait()  # until the watch has ended it
            sampling = frame.request.sampling
            asked = Segment((), temperature=sampling.temperature, origin=Origin(asked_s=time.time()), sampling=sampling)
            self.turns.update((turn, Recorded(asked)) for turn in turns)
            async with aclosing(self._engine.generate(frame.request)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    self.turns[frame.turn + chunk.completion].add(chunk)
                    self._num_tokens += len(chunk.token_ids)
                    self._send(Given(self.number, frame.turn, chunk=bare_chunk(chunk)))
        except (EngineError, SchemaError) as error:
            self._send(Given(self.number, frame.turn, problem=Problem.of(error)))
        except Exception as error:  # the request is the user's: whatever it breaks here ends it, never the worker
            logger.warning("event=request_failed request=%s error=%r", frame.request.request_id, error, exc_info=error)
            self._send(Given(self.number, frame.turn, problem=Problem("EngineError", f"{type(error).__name__}: {error}")))
        else:
            self._send(Given(self.number, frame.turn))

    async def _answer(self, frame: Save | Abort | Info | Look) -> None:
        info = image = None
        try:
            if isinstance(frame, Save):
                if self._store is not None:
                    await self._store(frame.rollout, frame.data, [self.turns[turn] for turn in sorted(self.turns)])
            elif isinstance(frame, Look):
                if self._images is None:
                    raise SchemaError("the task has no images")
                image = await self._images(frame.place)
            elif self._engine is None:
                raise EngineError("a reward has no engine to ask")
            elif isinstance(frame, Abort):
                await self._engine.abort(frame.request_id)
            else:
                info = await self._engine.info()
        except (EngineError, SchemaError, NotFound) as error:
            self._send(Answer(self.number, frame.number, problem=Problem.of(error)))
        else:
            self._send(Answer(self.number, frame.number, info=info, image=image))

    def repeated(self, given: Sequence[Returned]) -> set[int]:
        """Which of the episodes have turns that those before them have, all of them, so that they would be trained a second time.

        Turns that drew the same tokens cannot be told apart, so each may be given as often as it was drawn; a call that goes on from a
        checkpoint does not know how often that was. Branches say what they share.
        """
        if self._resumes:
            return set()
        drawn = Counter((tuple(turn.token_ids), tuple(turn.logprobs)) for turn in self.turns.values())
        uses = Counter[tuple[object, ...]]()
        found: set[int] = set()
        for index, returned in enumerate(given):
            pieces = [piece for one in returned.pieces for piece in one.turns]
            turns = [(self.turns[turn], start, stop) for turn, start, stop in pieces if turn in self.turns]
            keys = [((tuple(turn.token_ids), tuple(turn.logprobs)), start, stop) for turn, start, stop in turns]
            if returned.branch is None and keys and all(uses[key] >= drawn[key[0]] for key in keys):
                found.add(index)
            uses.update(keys)
        return found

    def episode(self, returned: Returned) -> Episode:
        """What a child returned, with tokens, log-probs and versions of the model's turns as they were recorded here.

        Raises:
            SchemaError: it is no valid episode, or names turns that this call did not have.
        """
        segments: list[Segment] = []
        last = Recorded()
        for piece in returned.pieces:
            if not piece.turns:
                if any(not 0 <= token < _MAX_TOKEN for token in piece.token_ids):
                    raise SchemaError(f"token ids must be 0 or more and below 2**31, got {min(piece.token_ids)} to {max(piece.token_ids)}")
                segments.append(Segment(piece.token_ids))
                continue
            for turn, start, stop in piece.turns:
                found = self.turns.get(turn)
                if found is None or not 0 <= start <= stop <= len(found.token_ids):
                    raise SchemaError(f"the rollout had no tokens {start} to {stop} of a turn {turn}")
                last = found
                segments.append(found.part(start, stop, beside=True))
        return Episode(
            segments=tuple(segments),
            finish_reason=returned.finish_reason,
            status=returned.status,
            turns=returned.texts,
            sampling=returned.sampling,
            logprob_mode=last.mode,
            seed=returned.seed,
            engine=last.engine,
            rollout=returned.rollout,
            reward=returned.reward,
            agent=returned.agent,
            reward_parts=returned.reward_parts,
            metadata=msgspec.json.decode(returned.metadata, type=dict) if returned.metadata else {},
            branch=returned.branch,
            started_s=returned.started_s,
            finished_s=returned.finished_s,
        )
