"""The engines a producer can ask: found by their presence on the bus, the least loaded first, one engine per session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec

from streamrl.bus.protocol import KeyEntry, KeyValue
from streamrl.engines.protocol import Chunk, Engine, EngineInfo, GenerateRequest
from streamrl.errors import EngineError, EngineSilent, EngineUnavailable, SchemaError
from streamrl.runtime.worker import ENGINES_FAIL, ENGINES_LEFT_OUT
from streamrl.schemas.codec import decode
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.subjects import PREFIX_PRESENCE
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

PREFIX = f"{PREFIX_PRESENCE}engines/"
_MAX_SESSIONS = 65536
_WARN_EVERY_S = 10.0
_MANY_FAILURES = 3
"""Requests that an engine fails in a row, and is left out for a while where there are others: one that is refused says nothing."""
_LONGEST_S = 30.0
_WHY_CHARS = 300
"""An engine's error may be a whole traceback."""
_MOST_STEP_S = 5.0
"""Most that counts of the time between two presences; a producer that stood still has not listened."""
_PATIENCE = 2.0
"""Times the tokens that a call may have, by which each other call of its engine is ahead of it."""


class Silence:
    """One call that is open: one that is never answered is told from one that waits for a version, for a slot, or for many tokens.

    An answer may come as a whole at its end, so that no token has come says little by itself. What is known of an engine is its
    presence, about once a second: how many tokens it has made, and how many requests it has.

    Args:
        request: what is asked.
        limit_s: seconds without a token after which it may be given up; 0: never.
    """

    def __init__(self, request: GenerateRequest, limit_s: float) -> None:
        self._request = request
        self._limit_s = limit_s
        self._waited: asyncio.Timeout | None = None
        self._tokens = [0] * len(request.seeds)
        self._idle_s = self._silent_s = self._due = 0.0
        self.why = ""
        """Why it has been given up."""

    def until(self) -> asyncio.Timeout:
        """A context for the wait for its next chunk, which raises TimeoutError once it is given up."""
        self._waited = asyncio.timeout(0 if self.why else None)
        return self._waited

    def heard(self, chunk: Chunk) -> None:
        """Take what it was given; raises EngineSilent for a call that goes on without an end."""
        if chunk.token_ids:
            self._idle_s = self._silent_s = self._due = 0.0
        self._tokens[chunk.completion] += len(chunk.token_ids)
        if (got := self._tokens[chunk.completion]) > (most := self._request.sampling.max_new_tokens):
            raise EngineSilent(f"expected at most {most} tokens of {chunk.engine or 'an engine'}, got {got} and no end")

    def look(self, before: EnginePresence, now: EnginePresence, seconds: float) -> None:
        """Judge it by what its engine has done meanwhile."""
        if not self._limit_s or self.why or now.serving is None or now.serving < self._request.least:
            return
        seconds = min(seconds, _MOST_STEP_S)
        made = now.tokens_total - before.tokens_total
        if not now.running and not now.waiting:
            self._idle_s += seconds
        elif made > 0 and not now.waiting:  # else it may wait for a slot itself
            self._silent_s += seconds
            self._due += made / max(1, now.running)
        most = self._request.sampling.max_new_tokens
        if self._idle_s > self._limit_s:
            self.why = f"{now.engine} has no request, and has not answered this one for {self._idle_s:.0f} s (producer.silent_call_s)"
        elif self._silent_s > self._limit_s and self._due > _PATIENCE * most:
            self.why = (
                f"{now.engine} has made {self._due:.0f} tokens for each other call, and none for this one, which may have {most}, "
                f"for {self._silent_s:.0f} s (producer.silent_call_s)"
            )
        if self.why and self._waited is not None:
            with contextlib.suppress(RuntimeError):  # it does not wait at this moment
                self._waited.reschedule(asyncio.get_running_loop().time())


class _Member:
    """One engine of the pool."""

    def __init__(self, presence: EnginePresence, engine: Engine) -> None:
        self.presence = presence
        self.engine = engine
        self.own = 0
        """Completions this producer has in flight there."""
        self.others = 0
        """Completions of everybody else there, as of the last presence."""
        self.suspect = False
        """A request failed there since the last presence."""
        self.failures = 0
        """Requests that have failed there since one was answered."""
        self.why = ""
        """The newest of them failed for this reason."""
        self.left_out_until_s = 0.0
        """On the loop's clock: one that fails at once has the least load, and would get every request."""
        self.open: set[Silence] = set()
        """This producer's calls there."""
        self._seen_s = asyncio.get_running_loop().time()

    def update(self, presence: EnginePresence) -> None:
        before_s, self._seen_s = self._seen_s, asyncio.get_running_loop().time()
        for call in self.open:
            call.look(self.presence, presence, self._seen_s - before_s)
        self.presence = presence
        self.suspect = False
        # Presence is up to a second old and counts this producer's requests too; its own it knows exactly.
        self.others = max(0, presence.running + presence.waiting - self.own)

    def room(self, request: GenerateRequest) -> float:
        """Tokens that the engine can add to the prompt, as far as it has said."""
        longest = self.presence.max_len
        return math.inf if isinstance(longest, msgspec.UnsetType) else longest - len(request.prompt_ids)

    def failed(self, why: str, now_s: float) -> None:
        """One request more."""
        self.failures += 1
        self.why = " ".join(why.split())[:_WHY_CHARS]
        if self.failures >= _MANY_FAILURES:
            self.left_out_until_s = now_s + min(_LONGEST_S, 2.0 ** (self.failures - _MANY_FAILURES))

    def said(self) -> str:
        return f"{self.presence.engine}, {self.failures} requests in a row, the newest: {self.why}"

    def load(self) -> float:
        return (self.own + self.others) / max(1, self.presence.slots)


class EnginePool:
    """All live engines of one policy, as one `Engine`.

    `run` must be running: it follows `presence/engines/`. A request goes to the least loaded engine that serves its `least` version
    already, if there is one, else to the least loaded (which holds it back until it does). Waits while there is none. An engine that
    could not be reached gets no new requests until its presence is renewed; what runs there goes on. One that fails three in a row gets
    none for a second, then for twice as long each time (30 s at most), while there are others.

    Args:
        kv: keys of the run.
        connect: opens a client; called once per engine and address. A client with `async close()` is closed when its engine is dropped.
        policy: engines of other policies are ignored.
        role: so are those with another role; empty takes every role.
        silent_s: `producer.silent_call_s`.
    """

    def __init__(
        self,
        kv: KeyValue,
        connect: Callable[[EnginePresence], Engine],
        *,
        policy: str = "policy",
        role: str = "",
        silent_s: float = 0.0,
    ) -> None:
        self._kv = kv
        self._connect = connect
        self._policy = policy
        self._role = role
        self._silent_s = silent_s
        self._members: dict[str, _Member] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._found = asyncio.Event()
        self._num_waiting = 0
        self._cramped = (0, 0)
        """Requests in a row whose prompts no engine had room for, and the tokens of the last."""

    @property
    def wait(self) -> str:
        """Requests wait for an engine that is there, or for one that answers; else some are left out; empty: none of it."""
        members = self._members.values()
        if members and all(member.failures for member in members):
            return f"{ENGINES_FAIL}: {max(members, key=lambda member: member.failures).said()}"
        count, tokens = self._cramped
        if count >= _MANY_FAILURES:
            return f"{ENGINES_FAIL}: none has room for {count} prompts in a row, the newest of {tokens} tokens"
        if self._num_waiting:
            return f"waits for an engine: {self._num_waiting} requests"
        failing = [member for member in members if member.failures >= _MANY_FAILURES]
        return f"{ENGINES_LEFT_OUT}: {'; '.join(member.said() for member in failing[:3])}" if failing else ""

    @property
    def engines(self) -> dict[str, EnginePresence]:
        """The engines of the pool by id."""
        return {name: member.presence for name, member in self._members.items()}

    async def run(self) -> None:
        """Follow the engines' presence for ever; closes the clients when cancelled."""
        try:
            async for entry in self._kv.watch(PREFIX):
                await self._on_presence(entry)
        finally:
            # Shielded: a second cancellation must not leave the other clients' connections open.
            await asyncio.shield(asyncio.gather(*(self._drop(name, "closed") for name in list(self._members))))

    async def _on_presence(self, entry: KeyEntry) -> None:
        name = entry.key.removeprefix(PREFIX)
        if entry.value is None:
            await self._drop(name, "vanished")
            return
        try:
            presence = decode(entry.value, EnginePresence, where=f"key {entry.key}")
        except SchemaError as error:
            logger.warning("event=presence_unreadable engine=%s error=%s", name, error.message)
            return
        if presence.policy != self._policy or (self._role and presence.role != self._role):
            return
        member = self._members.get(name)
        if member is not None and member.presence.address != presence.address:
            await self._drop(name, "moved")
            member = None
        if member is None:
            member = self._members[name] = _Member(presence, self._connect(presence))
            logger.info("event=engine_found engine=%s address=%s", name, presence.address)
        member.update(presence)
        self._found.set()

    async def _drop(self, name: str, why: str) -> None:
        member = self._members.pop(name, None)
        if member is None:
            return
        logger.info("event=engine_dropped engine=%s reason=%s in_flight=%d", name, why, member.own)
        close = getattr(member.engine, "close", None)
        if close is not None:
            await close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `Engine.generate`; raises EngineError when the chosen engine fails or goes away."""
        member = await self._choose(request)
        cramped = member.room(request) < 1
        self._cramped = (self._cramped[0] + 1, len(request.prompt_ids)) if cramped else (0, 0)
        if cramped:  # nor has any other: each completion is as long as it can be
            for index in range(len(request.seeds)):
                name = member.presence.engine
                yield Chunk(completion=index, token_ids=(), logprobs=(), spans=(), finish_reason="length", engine=name)
            return
        count = len(request.seeds)
        member.own += count
        call = Silence(request, self._silent_s)
        member.open.add(call)
        try:
            async with aclosing(member.engine.generate(request)) as chunks:  # type: ignore[type-var]
                while (chunk := await _next(chunks, call)) is not None:
                    call.heard(chunk)
                    member.failures = 0
                    yield chunk
        except EngineError as error:
            member.failed(error.message, asyncio.get_running_loop().time())
            # A refused request says nothing against the engine; a broken connection does.
            member.suspect = isinstance(error, EngineUnavailable)
            raise
        finally:
            member.own -= count
            member.open.discard(call)

    async def found(self) -> None:
        """Return once there is an engine to ask."""
        while all(member.suspect for member in self._members.values()):
            await self._wait_for_engine()

    async def _wait_for_engine(self) -> None:
        self._found.clear()
        self._num_waiting += 1
        try:
            await asyncio.wait_for(self._found.wait(), _WARN_EVERY_S)
        except TimeoutError:
            logger.warning("event=waiting_for_engine policy=%s known=%d", self._policy, len(self._members))
        finally:
            self._num_waiting -= 1

    async def _choose(self, request: GenerateRequest) -> _Member:
        while not (usable := [name for name, member in self._members.items() if not member.suspect]):
            await self._wait_for_engine()
        now_s = asyncio.get_running_loop().time()
        usable = [name for name in usable if self._members[name].left_out_until_s <= now_s] or usable
        usable = [name for name in usable if self._members[name].room(request) >= 1] or usable
        name = self._sessions.get(request.session, "") if request.session else ""
        if name not in usable:
            name = min(usable, key=lambda other: self._rank(other, request.least))
        if request.session:
            self._sessions[request.session] = name
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return self._members[name]

    def _rank(self, name: str, least: Version) -> tuple[bool, float, str]:
        member = self._members[name]
        serving = member.presence.serving
        return serving is None or serving < least, member.load(), name

    async def abort(self, request_id: str) -> None:
        for member in list(self._members.values()):
            await member.engine.abort(request_id)

    async def info(self) -> EngineInfo:
        """Sums over the engines of the pool; raises EngineError while there is none."""
        infos = [await member.engine.info() for member in list(self._members.values())]
        if not infos:
            raise EngineError(f"expected an engine of policy {self._policy!r}, there is none", hint="is an engine worker running?")
        return EngineInfo(
            engine="pool",
            policy=self._policy,
            serving=min((info.serving for info in infos if info.serving is not None), default=None),
            running=sum(info.running for info in infos),
            waiting=sum(info.waiting for info in infos),
            slots=sum(info.slots for info in infos),
            max_len=min(info.max_len for info in infos),
            tokens_total=sum(info.tokens_total for info in infos),
            swaps_total=sum(info.swaps_total for info in infos),
        )


async def _next(chunks: AsyncIterator[Chunk], call: Silence) -> Chunk | None:
    """The next chunk, None at the end; raises EngineSilent once the call has been given up."""
    waits = call.until()
    try:
        async with waits:
            return await anext(chunks, None)
    except TimeoutError:
        if not waits.expired():
            raise
        raise EngineSilent(call.why, hint="does the engine's log say why?") from None
