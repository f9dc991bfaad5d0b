"""The evaluations of a run, in bounded memory."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.monitor.numbers import Evaluation
from streamrl.schemas.versions import Version

MOST_EVALUATIONS = 256
"""Of a set of problems."""
MOST_SETS = 64
_NEWEST = 8
"""Newest versions that are always kept."""


class Evaluations:
    """The newest evaluation of each version, for each set of problems.

    Once a set has too many, every second goes; the first, the first after the warm-up and the newest ones stay. The first set is that of
    `data.heldout`, without it the one that was evaluated first.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Evaluation] = {}
        """The one of each set that came last."""
        self._by_version: dict[str, dict[Version, Evaluation]] = {}

    def add(self, one: Evaluation, *, last_cold: int) -> bool:
        """Take one, and say whether there was room for its set.

        `last_cold` is the newest version number before the end of the warm-up, -1 for none.
        """
        if one.set not in self._newest and len(self._newest) >= MOST_SETS:
            return False
        self._newest[one.set] = one
        kept = self._by_version.setdefault(one.set, {})
        kept[one.version] = one
        if len(kept) > MOST_EVALUATIONS:
            ordered = self.of(one.set)
            learning = next((other.version for other in ordered if other.version.number > last_cold), None)
            for place, other in enumerate(ordered[:-_NEWEST]):
                if place % 2 and other.version != learning:
                    del kept[other.version]
        return True

    @property
    def first_set(self) -> str:
        """Its name; that of `data.heldout` while there is none."""
        return HELDOUT if HELDOUT in self._newest else next(iter(self._newest), HELDOUT)

    @property
    def newest(self) -> Evaluation | None:
        """The one of the first set that came last."""
        return self._newest.get(self.first_set)

    @property
    def others(self) -> tuple[Evaluation, ...]:
        """The newest of each other set, without its problems."""
        return tuple(replace(one, problems=()) for name, one in self._newest.items() if name != self.first_set)

    @property
    def sets(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._newest)

    def of(self, name: str) -> list[Evaluation]:
        """Those of a set, by version."""
        found = self._by_version.get(name, {})
        return [found[version] for version in sorted(found)]

    @property
    def ordered(self) -> list[Evaluation]:
        """Those of the first set, by version."""
        return self.of(self.first_set)
