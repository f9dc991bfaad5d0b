"""The launch seam: where workers run. The supervisor decides when; a launcher knows how."""

from __future__ import annotations

from typing import Protocol


class Process(Protocol):
    """One started worker."""

    @property
    def pid(self) -> int:
        """Process id on the machine it runs on."""
        ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Never blocks."""
        ...

    def heard(self) -> str:
        """The newest beat since the last call (`streamrl.runtime.beats`); empty: none. Never blocks."""
        ...

    @property
    def why(self) -> str:
        """Why who watches it has ended it, where that is not the supervisor; empty: it has not."""
        ...

    def dump(self) -> None:
        """Have it write its stacks to its log; no error if it has ended."""
        ...

    def stop(self) -> None:
        """Ask it to drain and end; no error if it has ended."""
        ...

    def kill(self) -> None:
        """End it and whatever it has started at once; no error if it has ended."""
        ...


class Launcher(Protocol):
    """Starts workers. Adapter: `local` (child processes of the supervisor)."""

    def start(self, kind: str, index: int) -> Process:
        """Start a worker; raises LaunchError when that is not possible."""
        ...

    def tail(self, worker: str) -> str:
        """The last lines of a worker's log."""
        ...
