"""Engine calls that are never answered: told from those that wait for a version, for a slot, or for many tokens.

An answer may come as a whole at its end, so that no token has come says little by itself. What is known of an engine is its presence,
about once a second: how many tokens it has made, and how many requests it has.
"""

from __future__ import annotations

import asyncio
import contextlib

from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.errors import EngineSilent
from streamrl.schemas.control import EnginePresence

_MOST_STEP_S = 5.0
"""Of the time between two presences; a producer that stood still has not listened."""
_PATIENCE = 2.0
"""Times the tokens that a call may have, by which each other call of its engine is ahead of it."""


class Silence:
    """One call that is open.

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
        if not self._limit_s or self.why or now.serving is None or now.serving.number < self._request.min_version:
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
