"""One session: the calls that an agent makes for one rollout, each stored before it is answered, and how it ends.

```text
call -> the same as an earlier one? its stored answer
     -> place in the tree -> engine -> entry in the journal -> answer
```

An engine's call belongs to the session, not to the connection that asked: when the client goes away it is finished and stored, and the same
call gets the answer. Only the end of the session, or of its task here, cuts it short, and then nothing is stored of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import BusError, Conflict, EngineError, EngineUnavailable, SchemaError, StreamFull
from streamrl.producers.completions import Completion, complete
from streamrl.producers.gateway.entries import Ended, Entry, Rewarded, Started, Tokens, Turn, packed_ids
from streamrl.producers.gateway.errors import ApiError, gone, later, refused, too_long
from streamrl.producers.gateway.journal import Journal
from streamrl.producers.gateway.placing import Place, Rules
from streamrl.producers.gateway.sampling import sampling_of, within
from streamrl.producers.gateway.tree import Node, Tree
from streamrl.producers.protocol import Context
from streamrl.producers.repeats import Repeats
from streamrl.schemas.tasks import Sampling

logger = logging.getLogger(__name__)

ENTRY_BYTES = 512
"""What a turn takes beside its tokens."""
LARGE = 1 << 17
"""Bytes of a request whose text is tokenised beside the loop."""
AGAIN_S = 2.0
"""`Retry-After` of what is refused for now."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A call, whichever API it came by."""

    place: Callable[[Tree], Place]
    fields: Mapping[str, Any]
    """Of its sampling."""
    where: str = ""
    """What stands before their names in errors."""
    request: bytes
    """Fingerprint: equal for calls that ask the same."""
    key: str = ""
    """Its `Idempotency-Key`."""
    seed: int | None = None
    """The agent's own, which is mixed into the rollout's."""
    tools: Any = None
    size: int = 0
    """Bytes of its request."""

    @property
    def known_by(self) -> bytes | str:
        """By what it is recognised when it comes again."""
        return self.key or self.request


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Of one session."""

    max_turns: int
    max_calls: int
    """At the same time."""
    call_s: float
    """That a call is waited for."""
    max_bytes: int
    """Of its turns."""


class Session:
    """One rollout. Of one event loop; made for each rollout of a claimed task, whether an agent has it already or not.

    Args:
        context: of the rollout.
        rules: of its task.
        journal: where its entries are.
        bounds: of it.
        entries: that the journal has already.
        touched: called whenever it has moved.
    """

    def __init__(
        self, context: Context, rules: Rules, journal: Journal, bounds: Bounds, entries: Sequence[Entry], touched: Callable[[], None]
    ) -> None:
        self.context = context
        self.rules = rules
        self.tree = rules.tree()
        self.started: Started | None = None
        self.reward: Rewarded | None = None
        self.ended: Ended | None = None
        self.reserved = False
        """Whether it is being given to an agent."""
        self.active_s = time.monotonic()
        """When an agent was last heard, or answered."""
        self.agent_s = 0.0
        """That the agent has had in all, its calls left out."""
        self._journal = journal
        self._bounds = bounds
        self._touched = touched
        self._num_entries = 0
        self._num_calls = 0
        self._num_rewards = 0
        self._num_bytes = 0
        self._answers: dict[bytes | str, Node] = {}
        self._making: dict[bytes | str, tuple[bytes, asyncio.Task[Node]]] = {}
        self._writing = asyncio.Lock()
        self._closed: ApiError | None = None
        self._doubtful: Entry | None = None
        """Of which it is not known whether it was stored, under the next number."""
        self.moved = False
        """Whether another gateway has gone on with it."""
        for entry in entries:
            self._take(entry)

    @property
    def name(self) -> str:
        """`<task>.<rollout>`."""
        return f"{self.context.task.index}.{self.context.rollout_index}"

    @property
    def busy(self) -> bool:
        """Whether a call is open."""
        return bool(self._making)

    async def start(self, started: Started) -> None:
        """Give it to an agent; raises ApiError."""
        if self._closed is not None:
            raise self._closed
        await self._store(started)
        self.active_s = time.monotonic()

    async def call(self, ask: Ask) -> Node:
        """The turn that answers a call; returns once it is stored.

        Raises:
            ApiError: refused, or not to be answered now.
        """
        self._check_open()
        self._moves()
        found = self._answers.get(ask.known_by)
        if found is not None and found.turn is not None:
            _check_same(ask, found.turn.request)
            return found
        begun = self._making.get(ask.known_by)
        if begun is None:
            making = self._begin(ask)
        else:
            _check_same(ask, begun[0])
            making = begun[1]
        done, _ = await asyncio.wait((making,), timeout=self._bounds.call_s)
        if not done:
            raise later(
                f"expected an answer of the engines within {self._bounds.call_s:g} s, there is none yet",
                AGAIN_S,
                hint="repeat the call: it goes on meanwhile, and gets its answer",
                code="engine_timeout",
                status=504,
            )
        if making.cancelled():
            raise self._closed or later("the session is no longer here", AGAIN_S)
        return making.result()

    def _begin(self, ask: Ask) -> asyncio.Task[Node]:
        if len(self.tree.turns) + len(self._making) >= self._bounds.max_turns:
            raise refused(f"expected at most {self._bounds.max_turns} turns in a session, got one more", code="too_many_turns")
        if len(self._making) >= self._bounds.max_calls:
            raise later(
                f"expected at most {self._bounds.max_calls} calls of a session at a time, got one more", AGAIN_S, status=429, code="busy"
            )
        if self._num_bytes > self._bounds.max_bytes:
            raise refused(
                f"expected at most {self._bounds.max_bytes} bytes of turns in a session (a part of bus.turns_bytes), got more",
                code="too_many_turns",
            )
        making = asyncio.create_task(self._make(ask), name=f"call {self.name}")
        self._making[ask.known_by] = (ask.request, making)
        making.add_done_callback(lambda task: self._made(ask, task))
        return making

    def _made(self, ask: Ask, task: asyncio.Task[Node]) -> None:
        del self._making[ask.known_by]
        self.active_s = time.monotonic()
        if not task.cancelled():
            task.exception()  # its asker may have gone
        self._touched()

    def _within(self, sampling: Sampling, place: Place) -> Sampling:
        length = len(place.kept) + len(place.context)
        room = self.context.max_len - length if self.context.max_len else sampling.max_new_tokens
        if room < 1:
            raise too_long(length, self.context.max_len)
        return within(sampling, room)

    async def _make(self, ask: Ask) -> Node:
        # What is wrong with the call itself is said before anything is asked.
        fields = {name: value for name, value in ask.fields.items() if name != "temperature" or not self.context.is_baseline}
        sampling = self.context.drawn(sampling_of(fields, self.rules.task.sampling, self.rules.drawable, ask.where))
        # A large text takes the tokenizer seconds, in which the loop has leases to keep. The tree only grows.
        place = await asyncio.to_thread(ask.place, self.tree) if ask.size > LARGE else ask.place(self.tree)
        sampling = self._within(sampling, place)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        made = await self._complete(place, sampling, self._seed(number, ask.seed))
        if not made.token_ids:
            raise too_long(len(place.prompt_ids), 0)
        if self.tree.turns and made.logprob_mode != self._mode:
            raise later(f"expected log-probs of mode {self._mode} in every turn, got {made.logprob_mode} from {made.engine}", AGAIN_S)
        tokens = Tokens.of(made)
        rendering = self.rules.rendering
        whole, *parts = rendering.said(rendering.text(tokens, sampling), ask.tools or self.context.task.tools, place.prompt_ids)
        turn = Turn(
            parent=place.parent,
            heard=place.heard,
            context=packed_ids(place.context),
            family=place.family,
            said=whole,
            said_in_part=tuple(parts),
            retold=place.retold,
            tokens=tokens,
            sampling=sampling,
            seed=number,
            request=ask.request,
            key=ask.key,
            made_s=time.time(),
        )
        await self._store(turn)
        return self.tree.turns[-1]

    async def _complete(self, place: Place, sampling: Sampling, seed: int) -> Completion:
        context = self.context
        repeats = Repeats(context.task.index, context.rollout_index)
        while True:
            request = GenerateRequest(
                request_id=f"{self.name}-{uuid4().hex}",
                prompt_ids=place.prompt_ids,
                sampling=sampling,
                policy=context.task.policy,
                seeds=(seed,),
                min_version=context.task.min_version,
                min_epoch=context.task.least.epoch,
                session=self.name,
            )
            try:
                [made] = await complete(context.engine, request)
                return made
            except EngineError as error:
                try:
                    if await repeats.again(error):
                        continue
                except EngineUnavailable as away:
                    raise later(f"the engines stay away: {away.message}", AGAIN_S, code="engine_unavailable") from away
                raise ApiError(502, f"the engines refuse the call: {error.message}", hint=error.hint, code="engine_error") from error

    def _seed(self, number: int, own: int | None) -> int:
        # The first call has the rollout's own seed, so one call here equals the built-in producer.
        seed = rollout_seed(self.context.seed, number) if number else self.context.seed
        return seed if own is None else rollout_seed(seed, own & ((1 << 62) - 1))

    @property
    def _mode(self) -> str:
        first = self.tree.turns[0].turn
        return "" if first is None else first.tokens.mode

    async def set_reward(self, reward: Rewarded) -> None:
        """What the rollout is worth."""
        self._check_open()
        self._moves()
        if self._num_rewards >= self._bounds.max_turns:
            raise refused(f"expected at most {self._bounds.max_turns} rewards of a session, got one more", code="too_many_rewards")
        if reward != self.reward:
            await self._store(reward)

    async def end(self, ended: Ended) -> None:
        """No further calls; those that are open are cut short. A second time changes nothing."""
        if self.ended is not None:
            return
        before = self._closed
        self._cut(gone("the session has ended"))
        try:
            await self._store(ended)
        except ApiError:
            self._closed = before  # it has not ended, and may be asked to again
            raise

    def close(self, why: ApiError) -> None:
        """Its task is no longer here: open calls are cut short, others refused with `why`."""
        self._closed = self._closed or why
        self._cut(self._closed)

    def _cut(self, why: ApiError) -> None:
        self._closed = self._closed or why
        for _, making in self._making.values():
            making.cancel()

    def _check_open(self) -> None:
        if self.ended is not None:
            why = f": {self.ended.reason}, {self.ended.detail}" if self.ended.reason else ""
            raise gone(f"the session has ended{why}")
        if self._closed is not None:
            raise self._closed

    def _moves(self) -> None:
        now_s = time.monotonic()
        if not self._making:
            self.agent_s += now_s - self.active_s
        self.active_s = now_s

    async def _store(self, entry: Entry) -> None:
        """Store an entry and take it; raises ApiError when it is not stored, and then it was not made.

        One that is being stored is waited for by the next, also where its caller was cut short.
        """
        await asyncio.shield(asyncio.create_task(self._write(entry)))

    async def _write(self, entry: Entry) -> None:
        async with self._writing:
            try:
                await self._settle()
                if self.ended is not None:
                    if isinstance(entry, Ended):
                        return
                    raise gone("the session has ended")
                self._doubtful = entry
                await self._journal.append(self.context.task.index, self.context.rollout_index, self._num_entries, entry)
                self._doubtful = None
            except Conflict as error:
                self._doubtful = None
                self.moved = True
                self.close(later("the session goes on at another gateway, which has its task now", AGAIN_S, code="session_moved"))
                self._touched()
                raise self._closed or later(error.message, AGAIN_S) from error
            except StreamFull as error:
                self._doubtful = None
                raise later(
                    f"the turns of open sessions fill their store: {error.message}",
                    AGAIN_S,
                    hint="raise bus.turns_bytes",
                    code="store_full",
                ) from error
            except SchemaError as error:
                self._doubtful = None
                raise refused(error.message, code="turn_too_large") from error
            except BusError as error:
                raise later(f"the run's bus is away: {error.message}", AGAIN_S, code="bus_unavailable") from error
            self._take(entry)
        self._touched()

    async def _settle(self) -> None:
        """Find out whether an entry was stored to whose storing there was no answer; raises BusError."""
        if self._doubtful is None:
            return
        place = self.context.task.index, self.context.rollout_index, self._num_entries
        if await self._journal.has(*place, self._doubtful):
            self._take(self._doubtful)
        self._doubtful = None

    def _take(self, entry: Entry) -> None:
        self._num_entries += 1
        if isinstance(entry, Turn):
            node = self.tree.add(entry)
            self._num_bytes += len(entry.context) + len(entry.tokens.ids) + len(entry.tokens.logprobs) + ENTRY_BYTES
            self._answers[entry.key or entry.request] = node
            self._num_calls = max(self._num_calls, entry.seed + 1)
        elif isinstance(entry, Started):
            self.started = entry
        elif isinstance(entry, Rewarded):
            self.reward = entry
            self._num_rewards += 1
        else:
            self.ended = entry


def _check_same(ask: Ask, request: bytes) -> None:
    if ask.request != request:
        raise ApiError(
            422,
            f"expected the same call for the same Idempotency-Key, got another one for {ask.key!r}",
            hint="use a new Idempotency-Key for a new call",
            code="idempotency_key_reused",
        )
