"""Tasks drawn from one set of rows, or from several by a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.core.seeds import mix64
from streamrl.data.mixture import segment_of, source_of
from streamrl.data.problems import Problem, TaskRows, Unusable
from streamrl.schemas.control import MixtureSegment


class Drawn(NamedTuple):
    """What a task is made of."""

    epoch: int
    """Passes over its set before this one."""
    problem: Problem | Unusable
    source: str = ""
    """Name of its set where there are several."""


class MixedRows:
    """Several sets. Rows by number are those of the first set, then those of the second, and so on.

    Args:
        names: of the sets.
        sets: their rows.
        segments: what is on record of the mixture; tasks after the warm-up are drawn by it.
    """

    def __init__(self, names: Sequence[str], sets: Sequence[TaskRows], segments: Sequence[MixtureSegment] = ()) -> None:
        self.names = tuple(names)
        self.sets = tuple(sets)
        self.segments = tuple(segments)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the sets' names and digests."""
        return hashlib.sha256(
            " ".join(f"{name}:{one.digest}" for name, one in zip(self.names, self.sets, strict=True)).encode()
        ).hexdigest()

    def take(self, rows: Sequence[int]) -> list[Problem | Unusable]:
        """Rows by number."""
        places: list[tuple[int, int]] = []
        for row in rows:
            source = 0
            while row >= len(self.sets[source]):
                row -= len(self.sets[source])
                source += 1
            places.append((source, row))
        return _take(self.sets, places)


def draw(rows: TaskRows | MixedRows, places: Sequence[int], *, warmup: Sequence[MixtureSegment], seed: int, shuffle: bool) -> list[Drawn]:
    """What tasks are made of.

    Args:
        rows: the run's.
        places: of the tasks, in the warm-up or after it: each begins with the first pass.
        warmup: the mixture instead of that on record, for tasks of the warm-up; empty for others.
        seed: of the run.
        shuffle: whether passes are permuted.
    """
    if not isinstance(rows, MixedRows):
        order = [rows.order(seed, place, shuffle=shuffle) for place in places]
        return [Drawn(epoch, one) for (epoch, _), one in zip(order, rows.take([row for _, row in order]), strict=True)]
    segments = warmup or rows.segments
    chosen = [source_of(seed, segment_of(segments, place), place) for place in places]
    seeds = [mix64(seed ^ int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])) for name in rows.names]
    order = [rows.sets[source].order(seeds[source], place, shuffle=shuffle) for source, place in chosen]
    taken = _take(rows.sets, [(source, row) for (source, _), (_, row) in zip(chosen, order, strict=True)])
    return [Drawn(epoch, one, rows.names[source]) for (source, _), (epoch, _), one in zip(chosen, order, taken, strict=True)]


def _take(sets: Sequence[TaskRows], places: Sequence[tuple[int, int]]) -> list[Problem | Unusable]:
    """Of (set, row), each set asked once."""
    found: dict[int, Problem | Unusable] = {}
    for source in sorted({source for source, _ in places}):
        own = [at for at, (of, _) in enumerate(places) if of == source]
        found.update(zip(own, sets[source].take([places[at][1] for at in own]), strict=True))
    return [found[at] for at in range(len(places))]
