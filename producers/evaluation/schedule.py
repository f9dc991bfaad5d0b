"""Which version is to be evaluated next."""

from __future__ import annotations

from streamrl.schemas.versions import Version


class Schedule:
    """Which version is to be evaluated next on one set of problems; the newest that is due replaces older ones.

    Args:
        every: versions between evaluations, counted from the first; 0: the first and the last only.
        warmup: whether the first is the one that ends the warm-up; otherwise it is version 0.
        done: number of the newest version evaluated before, -1 for none.
    """

    def __init__(self, *, every: int, warmup: bool, done: int = -1) -> None:
        self._every = every
        self._first = None if warmup else 0
        self._done = done
        self._due = 0 if not warmup and done < 0 else -1
        self._last: int | None = None
        self._epochs: dict[int, int] = {}

    def version(self, number: int) -> Version:
        """The version of this number that was trained last."""
        return Version(self._epochs.get(number, 0), number)

    def trained(self, number: int, *, warm: bool, epoch: int = 0) -> None:
        """A version has been trained; called in order, from the first of the run."""
        self._epochs[number] = epoch
        if self._first is None and warm:
            self._first = number
            self._due = max(self._due, number)
        elif self._first is not None and self._every and (number - self._first) % self._every == 0:
            self._due = max(self._due, number)

    def finish(self, number: int) -> None:
        """The run has ended with this version."""
        self._last = number

    def take(self) -> tuple[int, bool] | None:
        """(version, whether it is the last), or None while nothing is due."""
        if self._last is not None:
            return self._last, True
        if self._due > self._done:
            self._done = self._due
            return self._due, False
        return None
