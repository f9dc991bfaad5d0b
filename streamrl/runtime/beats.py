"""Beats: how a worker shows who started it that its event loop turns. Over a pipe, so that a bus that is away is no silence.

```text
worker's event loop --b"l" while it loads, b"r" once it runs--> pipe --> Process.heard() --> Silence (in whoever may kill it)
```
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping

VARIABLE = "STREAMRL_BEATS"
"""Number of the pipe's end to write to, in the environment of a worker that is watched."""
LOADS, RUNS = "l", "r"
BEAT_S = 1.0
STACKS_S = 1.0
"""What a silent worker gets to write its stacks, before it is killed."""
_MOST_STEP_S = 1.0
"""Of the time between two looks counts this much at most: a watcher that was stopped, or suspended, has missed the beats itself."""


class Pulse:
    """The worker's end of the pipe; without one, nobody listens."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Pulse:
        """Take the pipe that the environment names, out of it: what this process starts is not to beat in its place."""
        named = environment.pop(VARIABLE, "")
        if not named.isdigit():
            return cls(None)
        with contextlib.suppress(OSError):
            os.set_inheritable(int(named), False)
            return cls(int(named))
        return cls(None)

    def beat(self, *, loading: bool) -> None:
        """Say that the loop turns. Never blocks: a full pipe has enough beats in it, and a closed one nobody to hear them."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, (LOADS if loading else RUNS).encode())


class Silence:
    """Counts how long a worker was not heard, on the clock of looks.

    Until its first beat it loads. While it loads only that has a limit, for reading a model may hold up its loop.

    Args:
        limit_s: longest silence; 0: no limit.
        loading_s: longest load.
        now_s: on a clock that never falls.
    """

    def __init__(self, limit_s: float, loading_s: float, now_s: float) -> None:
        self.seconds = 0.0
        """Without a beat."""
        self.why = ""
        """What is too long; empty: nothing yet."""
        self._limit_s = limit_s
        self._loading_s = loading_s
        self._loaded_for_s = 0.0
        self._loading = True
        self._looked_s = now_s

    def look(self, heard: str, now_s: float) -> str:
        """Take in the newest beat since the last look (empty: none); returns `why`."""
        step_s = min(max(0.0, now_s - self._looked_s), _MOST_STEP_S)
        self._looked_s = now_s
        self.seconds = 0.0 if heard else self.seconds + step_s
        if heard:
            self._loading = heard == LOADS
        self._loaded_for_s = self._loaded_for_s + step_s if self._loading else 0.0
        if self._loading and self._loaded_for_s > self._loading_s:
            self.why = f"loading for {self._loading_s:g} s"
        elif not self._loading and 0 < self._limit_s < self.seconds:
            self.why = f"silent for {self._limit_s:g} s"
        return self.why
