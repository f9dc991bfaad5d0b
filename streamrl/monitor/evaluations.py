"""The evaluations of a run, in bounded memory."""

from __future__ import annotations

from streamrl.monitor.numbers import Evaluation
from streamrl.schemas.versions import Version

MOST_EVALUATIONS = 256
_NEWEST = 8
"""Newest versions that are always kept."""


class Evaluations:
    """The newest evaluation of each version.

    Once there are too many, every second goes; the first, the first after the warm-up and the newest ones stay.
    """

    def __init__(self) -> None:
        self.newest: Evaluation | None = None
        """The one that came last."""
        self._by_version: dict[Version, Evaluation] = {}

    def add(self, one: Evaluation, *, last_cold: int) -> None:
        """Take one; `last_cold` is the newest version number before the end of the warm-up, -1 for none."""
        self.newest = one
        self._by_version[one.version] = one
        if len(self._by_version) > MOST_EVALUATIONS:
            ordered = self.ordered
            learning = next((other.version for other in ordered if other.version.number > last_cold), None)
            for place, other in enumerate(ordered[:-_NEWEST]):
                if place % 2 and other.version != learning:
                    del self._by_version[other.version]

    @property
    def ordered(self) -> list[Evaluation]:
        """By version."""
        return [self._by_version[version] for version in sorted(self._by_version)]
