"""Compare: two ledgers side by side, whether of runs, branches, taps or recordings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import WARMUP_SOURCE

WINDOW = 20
"""Batches in `first` and `last`."""

ROWS = (
    ("reward", "rollout/raw_reward"),
    ("loss", "train/loss"),
    ("staleness mean", "staleness/mean"),
    ("staleness max", "staleness/max"),
    ("tis", "train/tis"),
    ("tis clipped", "train/tis_clipfrac"),
    ("gradient norm", "train/grad_norm"),
    ("entropy", "train/entropy_loss"),
    ("tokens trained", "rollout/tokens_trained"),
)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one run over its batches of reinforcement learning."""

    numbers: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def first(self) -> float | None:
        """Mean of the first batches."""
        return statistics.fmean(self.values[:WINDOW]) if self.values else None

    @property
    def last(self) -> float | None:
        """Mean of the last batches."""
        return statistics.fmean(self.values[-WINDOW:]) if self.values else None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    name: str
    batches: int
    """Of reinforcement learning."""
    stale_rollouts: int
    """Dropped for their age."""
    curves: dict[str, Curve]
    """By metric name."""


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """Two ledgers."""

    a: Side
    b: Side
    same_batches_to: int
    """Version up to which both were trained from the same groups."""
    same_digests_to: int
    """Version up to which both have the same parameters."""

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Rows of (metric, a first, a last, b first, b last, b last - a last) as text; `-` where there is none."""
        rows: list[tuple[str, ...]] = []
        for title, name in ROWS:
            a, b = self.a.curves[name], self.b.curves[name]
            change = b.last - a.last if a.last is not None and b.last is not None else None
            rows.append((title, *(_text(value) for value in (a.first, a.last, b.first, b.last, change))))
        rows.append(("batches", "", str(self.a.batches), "", str(self.b.batches), str(self.b.batches - self.a.batches)))
        stale = (self.a.stale_rollouts, self.b.stale_rollouts)
        rows.append(("rollouts dropped as stale", "", str(stale[0]), "", str(stale[1]), str(stale[1] - stale[0])))
        return rows


def compare(name_a: str, a: Sequence[LedgerEntry], name_b: str, b: Sequence[LedgerEntry]) -> CompareReport:
    """Compare two ledgers; entries of one number count once, with the newest epoch."""
    first, second = _by_number(a), _by_number(b)
    return CompareReport(
        a=_side(name_a, first),
        b=_side(name_b, second),
        same_batches_to=_same_to(first, second, lambda entry: entry.used),
        same_digests_to=_same_to(first, second, lambda entry: entry.digest),
    )


def _by_number(entries: Sequence[LedgerEntry]) -> dict[int, LedgerEntry]:
    newest = {entry.version.number: entry for entry in sorted(entries, key=lambda entry: entry.version)}
    return dict(sorted(newest.items()))


def _side(name: str, entries: dict[int, LedgerEntry]) -> Side:
    learned = {number: entry for number, entry in entries.items() if entry.source != WARMUP_SOURCE}
    stale = sum(entry.dropped["stale"] for entry in entries.values())
    return Side(name=name, batches=len(learned), stale_rollouts=stale, curves={metric: _curve(learned, metric) for _, metric in ROWS})


def _curve(entries: dict[int, LedgerEntry], metric: str) -> Curve:
    points = [(number, entry.metrics[metric]) for number, entry in entries.items() if metric in entry.metrics]
    return Curve(numbers=tuple(number for number, _ in points), values=tuple(value for _, value in points))


def _same_to(a: dict[int, LedgerEntry], b: dict[int, LedgerEntry], of: Callable[[LedgerEntry], object]) -> int:
    begin = max(min(a, default=1), min(b, default=1))
    number = begin - 1
    while number + 1 in a and number + 1 in b and of(a[number + 1]) == of(b[number + 1]):
        number += 1
    return number


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
