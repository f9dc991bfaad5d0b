"""How often a rollout is begun again that an engine's error has ended; the others of its group are not touched."""

from __future__ import annotations

import asyncio
import logging

from streamrl.errors import EngineSilent, EngineUnavailable, StreamRLError
from streamrl.runtime.retries import pause_s

logger = logging.getLogger(__name__)

REFUSALS = 6
"""Times that a request which an engine refuses is repeated, over about 15 s; then its rollout has failed."""
_ABSENCES = 3
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Repeats:
    """Counts for one rollout, or for those of a group that go on together.

    Args:
        task: its index.
        rollout: which of the task's, for the log; None: those that are left.
    """

    def __init__(self, task: int, rollout: int | None = None) -> None:
        self._task = task
        self._rollout = rollout
        self._refusals = self._absences = 0

    async def again(self, error: StreamRLError) -> bool:
        """Whether it is to be begun again, after a pause; False: it has failed.

        Raises:
            EngineUnavailable: engines stay away; the task is to be given back.
        """
        away = isinstance(error, EngineUnavailable)
        # Minutes have been waited already for one that was silent.
        self._refusals += 0 if away else REFUSALS // 2 if isinstance(error, EngineSilent) else 1
        self._absences += away
        if self._absences > _ABSENCES:
            raise error
        if self._refusals >= REFUSALS:
            return False
        logger.warning("event=rollout_repeated task=%d rollout=%s error=%s", self._task, self._rollout, error.message)
        await asyncio.sleep(pause_s(self._refusals + self._absences, first_s=_PAUSE_S, most_s=_LONGEST_PAUSE_S))
        return True
