"""One delivery of a task to a gateway: the sessions of its rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from streamrl.producers.gateway.session import Session
from streamrl.schemas.tasks import RolloutTask


class Granted:
    """A claimed task: a session for each rollout."""

    def __init__(self, task: RolloutTask, sessions: Sequence[Session]) -> None:
        self.task = task
        self.sessions = sessions
        self.finished = asyncio.Event()
        self.is_over = asyncio.Event()
        """Whether this delivery of its task has come to its end."""
        self.idle_since_s = time.monotonic()
        """Since when no session of it is open."""

    @property
    def free(self) -> list[Session]:
        """Those that nobody has."""
        return [one for one in self.sessions if one.started is None and one.ended is None and not one.reserved]

    @property
    def is_unasked(self) -> bool:
        """Whether nobody has started any, nor is about to."""
        return len(self.free) == len(self.sessions)

    @property
    def is_open(self) -> bool:
        """Whether an agent has one."""
        return any(session.started is not None and session.ended is None for session in self.sessions)

    @property
    def num_open(self) -> int:
        """Those that agents have."""
        return sum(session.started is not None and session.ended is None for session in self.sessions)
