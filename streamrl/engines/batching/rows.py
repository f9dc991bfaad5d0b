"""The running batch: one row per completion, rows 0 .. count - 1 in use, as numpy arrays. Owned by the decode thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.core.seeds import uniform
from streamrl.engines.batching.edits import Editor
from streamrl.engines.batching.model import Draws
from streamrl.engines.requests import Completion, Stage
from streamrl.schemas.candidates import MOST_RECORDED, Candidates, CandidateSets, Ids, Logprobs, bounds_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version

Marks = list[tuple[int, Version]]
"""(first token, version): the version that samples from this token on."""


class Rows:
    """State of up to `slots` running completions.

    A row whose completion has ended is a hole until `Rows.take` gives it to a joiner or `Rows.compact` closes it; both
    happen before the next forward pass, so a pass never sees one.
    """

    def __init__(self, slots: int, max_len: int) -> None:
        self.slots = slots
        self.count = 0
        self.holes: list[int] = []
        self.owners: list[Completion | None] = [None] * slots
        self.marks: list[Marks] = [[] for _ in range(slots)]
        self.tokens = np.zeros(slots, np.int64)
        self.positions = np.zeros(slots, np.int64)
        self.drawn = np.zeros(slots, np.int64)
        self.limits = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.full(slots, -1, np.int64)
        self.min_p = np.zeros(slots, np.float32)
        self.edited = 0
        """Completions in the batch that have an editor."""
        self.streams = np.zeros(slots, np.bool_)
        self.wake_s = np.zeros(slots, np.float64)
        """Monotonic time before which a row is not advanced (artificial delay)."""
        self.stops = np.full((slots, 1), -1, np.int64)
        self.out_ids = np.zeros((slots, max_len), np.int32)
        self.out_logprobs = np.zeros((slots, max_len), np.float32)
        self.candidates: list[list[tuple[Ids, Logprobs | None]]] = [[] for _ in range(slots)]
        """Of each token that a row has drawn, where they are recorded."""
        self._recorded = np.zeros(slots, np.int64)
        self._all = np.arange(slots)

    @property
    def running(self) -> int:
        """Completions in the batch."""
        return self.count - len(self.holes)

    def index(self, n: int) -> npt.NDArray[np.int64]:
        """[n] row numbers 0 .. n - 1."""
        return self._all[:n]

    def take(self, joiners: Sequence[Completion], version: Version) -> list[int]:
        """Give every joiner a row, holes first; returns the rows."""
        fresh = len(joiners) - len(self.holes)
        if fresh > 0:
            rows = self.holes + list(range(self.count, self.count + fresh))
            self.holes, self.count = [], self.count + fresh
        else:
            rows, self.holes = self.holes[: len(joiners)], self.holes[len(joiners) :]
        widest = max(len(joiner.job.stops) for joiner in joiners)
        if widest > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, widest - self.stops.shape[1])), constant_values=-1)
        width = self.stops.shape[1]
        where = np.array(rows)
        jobs = [joiner.job for joiner in joiners]
        sampling = [job.request.sampling for job in jobs]
        self.tokens[where] = [job.prompt[-1] for job in jobs]
        self.positions[where] = [len(job.prompt) - 1 for job in jobs]
        self.drawn[where] = 0
        self.limits[where] = [job.limit for job in jobs]
        self.seeds[where] = np.array([joiner.job.seeds[joiner.index] for joiner in joiners], np.uint64)
        self.temperature[where] = [one.temperature for one in sampling]
        self.top_p[where] = [one.top_p for one in sampling]
        self.top_k[where] = [one.top_k for one in sampling]
        self.min_p[where] = [one.min_p for one in sampling]
        self.edited += sum(joiner.editor is not None for joiner in joiners)
        self.streams[where] = [job.request.stream for job in jobs]
        self.stops[where] = [job.stops + (-1,) * (width - len(job.stops)) for job in jobs]
        self.wake_s[where] = 0.0
        now_s = time.time()
        for row, joiner in zip(rows, joiners, strict=True):
            joiner.stage, joiner.row, joiner.began_s = Stage.RUNNING, row, now_s
            self.owners[row] = joiner
            self.marks[row], self.candidates[row] = [(0, version)], []
        self._recorded[where] = 0
        return rows

    def leave(self, row: int) -> None:
        """The completion of this row has ended."""
        owner = self.owners[row]
        assert owner is not None
        owner.stage, owner.row = Stage.ENDED, -1
        self.edited -= owner.editor is not None
        self.owners[row] = None
        self.holes.append(row)

    def compact(self) -> tuple[list[int], list[int]]:
        """Close the holes with rows from the end; returns (targets, sources), disjoint."""
        targets: list[int] = []
        sources: list[int] = []
        holes = set(self.holes)
        for hole in sorted(self.holes):
            while self.count - 1 in holes:
                self.count -= 1
                holes.discard(self.count)
            if hole >= self.count:
                break
            self.count -= 1
            targets.append(hole)
            sources.append(self.count)
            holes.discard(hole)
        self.holes = []
        if targets:
            self._copy(targets, sources)
        return targets, sources

    def _copy(self, targets: list[int], sources: list[int]) -> None:
        for array in (
            self.tokens, self.positions, self.drawn, self.limits, self.seeds, self.temperature, self.top_p, self.top_k, self.min_p,
            self.streams, self.wake_s, self.stops, self._recorded,
        ):  # fmt: skip
            array[targets] = array[sources]
        longest = int(self.drawn[sources].max())
        self.out_ids[targets, :longest] = self.out_ids[sources, :longest]
        self.out_logprobs[targets, :longest] = self.out_logprobs[sources, :longest]
        for target, source in zip(targets, sources, strict=True):
            owner = self.owners[source]
            assert owner is not None
            owner.row = target
            self.owners[target], self.owners[source] = owner, None
            self.marks[target], self.candidates[target] = self.marks[source], self.candidates[source]

    def draws(self, rows: npt.NDArray[np.int64] | slice) -> Draws:
        """How the next token of these rows is drawn; u depends on the completion's seed and the response position only."""
        return Draws(
            uniform=uniform(self.seeds[rows], self.drawn[rows]),
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            edits={at: editor.edit() for at, editor in self.editors(rows)} if self.edited else {},
        )

    def editors(self, rows: npt.NDArray[np.int64] | slice) -> list[tuple[int, Editor]]:
        """Those of these rows that have one, with their places among them."""
        owners = [self.owners[row] for row in self._all[rows].tolist()]
        return [(at, owner.editor) for at, owner in enumerate(owners) if owner is not None and owner.editor is not None]

    def append(
        self, rows: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Record one drawn token for each of `rows`; returns [n] bool: stopped by a stop token, ended by either."""
        at = self.drawn[rows]
        self.out_ids[rows, at] = ids
        self.out_logprobs[rows, at] = logprobs
        self.drawn[rows] = at + 1
        self.positions[rows] += 1
        self.tokens[rows] = ids
        stopped = (self.stops[rows] == ids[:, None]).any(axis=1)
        return stopped, stopped | (at + 1 >= self.limits[rows])

    def record(self, rows: npt.NDArray[np.int64], found: CandidateSets) -> None:
        """Keep the candidates of the tokens that were drawn last; of a completion that has too many, none any more."""
        self._recorded[rows] += found.counts
        for row, start, stop in zip(rows.tolist(), found.bounds.tolist(), found.bounds[1:].tolist(), strict=False):
            if self._recorded[row] > MOST_RECORDED:
                stop = start
            logprobs = None if found.logprobs is None else found.logprobs[start:stop]
            self.candidates[row].append((found.ids[start:stop], logprobs))

    def recorded(self, row: int) -> Candidates | None:
        """The candidates of the row's tokens; None where there are none."""
        found = self.candidates[row]
        if not any(len(ids) for ids, _ in found):
            return None
        logprobs = [one for _, one in found if one is not None]
        bounds = bounds_of(np.array([len(ids) for ids, _ in found]))
        sets = CandidateSets(bounds, np.concatenate([ids for ids, _ in found]), np.concatenate(logprobs) if logprobs else None)
        return Candidates.of(sets)

    def mark(self, version: Version) -> None:
        """From the next token on, `version` samples."""
        for row in range(self.count):
            if self.owners[row] is None:
                continue
            marks, start = self.marks[row], int(self.drawn[row])
            if marks[-1][0] == start:
                marks.pop()
            marks.append((start, version))

    def spans(self, row: int, start: int, end: int) -> tuple[VersionSpan, ...]:
        """Version spans of the row's tokens start .. end - 1."""
        marks = self.marks[row]
        if len(marks) == 1:
            return (VersionSpan(end - start, marks[0][1]),) if end > start else ()
        result: list[VersionSpan] = []
        for index, (first, version) in enumerate(marks):
            last = marks[index + 1][0] if index + 1 < len(marks) else end
            low, high = max(first, start), min(last, end)
            if high > low:
                result.append(VersionSpan(high - low, version))
        return tuple(result)
