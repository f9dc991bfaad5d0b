"""Compare: two ledgers side by side, whether of runs, branches, taps or recordings; as a table and as a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.history.differences import Difference, config_differences
from streamrl.history.source import Origin, read_config, read_origin, read_side
from streamrl.monitor.glance import ends
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.plot import smooth
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import WARMUP_SOURCE
from streamrl.telemetry.names import PARENT_DISTANCE

REWARD, SAMPLER_DISTANCE = "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"
ROWS = (
    ("reward", REWARD),
    ("loss", "train/loss"),
    ("distance to the parent", PARENT_DISTANCE),
    ("distance to the sampler", SAMPLER_DISTANCE),
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
        """Mean of the first batches, see `ends`."""
        return statistics.fmean(self.values[: ends(len(self.values))]) if self.values else None

    @property
    def last(self) -> float | None:
        """Mean of as many of the last ones."""
        return statistics.fmean(self.values[-ends(len(self.values)) :]) if self.values else None


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The first and the last evaluation of a set of problems."""

    first: float | None
    """Mean reward."""
    last: float | None
    passes: dict[int, float] = {}
    """pass@k of the last, by k."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    name: str
    batches: int
    """Of reinforcement learning."""
    stale_rollouts: int
    """Dropped for their age."""
    curves: dict[str, Curve]
    """By metric name."""
    evaluations: dict[str, Evaluated] = {}
    """By set of problems."""
    origin: Origin | None = None
    """Of a branch or a tap: its rewards are those recorded with another policy's samples. None: its samples are its own."""


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """Two ledgers."""

    a: Side
    b: Side
    same_batches_to: int
    """Version up to which both were trained from the same groups."""
    same_digests_to: int
    """Version up to which both have the same parameters."""
    differences: tuple[Difference, ...] = ()
    """Keys that the two configurations have other values for."""

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Rows of (metric, a first, a last, b first, b last, b last - a last) as text; `-` where there is none."""
        rows: list[tuple[str, ...]] = []
        for title, name in ROWS:
            a, b = self.a.curves[name], self.b.curves[name]
            if name == REWARD and (self.a.origin or self.b.origin):
                rows += _reward_rows(self.a, self.b)
            elif name != PARENT_DISTANCE or a.values or b.values:
                rows.append(_row(title, a, b))
        rows += _evaluation_rows(self.a.evaluations, self.b.evaluations)
        rows.append(("batches", "", str(self.a.batches), "", str(self.b.batches), str(self.b.batches - self.a.batches)))
        stale = (self.a.stale_rollouts, self.b.stale_rollouts)
        rows.append(("rollouts dropped as stale", "", str(stale[0]), "", str(stale[1]), str(stale[1] - stale[0])))
        return rows


def _row(title: str, a: Curve, b: Curve) -> tuple[str, ...]:
    return (title, *(_text(value) for value in (a.first, a.last, b.first, b.last, _change(a.last, b.last))))


def _reward_rows(a: Side, b: Side) -> list[tuple[str, ...]]:
    """Rewards that a side's own policy has earned, and recorded ones, in rows of their own: to compare one with the other says nothing."""
    nothing = Curve(numbers=(), values=())
    rows: list[tuple[str, ...]] = []
    for title, recorded in (("reward", False), ("recorded reward", True)):
        of = [side.curves[REWARD] if (side.origin is not None) == recorded else nothing for side in (a, b)]
        if of[0].values or of[1].values:
            rows.append(_row(title, *of))
    return rows


def _evaluation_rows(a: Mapping[str, Evaluated], b: Mapping[str, Evaluated]) -> list[tuple[str, ...]]:
    """The means of each set that one of them has, and the pass@k of the largest k that both have."""
    rows: list[tuple[str, ...]] = []
    none = Evaluated(first=None, last=None)
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name, none), b.get(name, none)
        values = (one.first, one.last, other.first, other.last)
        rows.append((f"eval {name}", *map(_text, values), _text(_change(one.last, other.last))))
        ks = one.passes.keys() & other.passes.keys() or one.passes.keys() | other.passes.keys()
        if (k := max(ks, default=1)) > 1:
            last_a, last_b = one.passes.get(k), other.passes.get(k)
            rows.append((f"eval {name} pass@{k}", "", _text(last_a), "", _text(last_b), _text(_change(last_a, last_b))))
    return rows


def _change(a: float | None, b: float | None) -> float | None:
    return b - a if a is not None and b is not None else None


def _evaluated(found: Sequence[Evaluation]) -> dict[str, Evaluated]:
    sets: dict[str, list[Evaluation]] = {}
    for one in found:
        sets.setdefault(one.set, []).append(one)
    return {name: Evaluated(first=of[0].accuracy, last=of[-1].accuracy, passes=of[-1].passes) for name, of in sets.items()}


def compare(
    name_a: str,
    a: Sequence[LedgerEntry],
    name_b: str,
    b: Sequence[LedgerEntry],
    *,
    evaluated_a: Sequence[Evaluation] = (),
    evaluated_b: Sequence[Evaluation] = (),
    origin_a: Origin | None = None,
    origin_b: Origin | None = None,
) -> CompareReport:
    """Compare two ledgers, and what was evaluated; entries of one number count once, with the newest epoch."""
    first, second = _by_number(a), _by_number(b)
    return CompareReport(
        a=_side(name_a, first, evaluated_a, origin_a),
        b=_side(name_b, second, evaluated_b, origin_b),
        same_batches_to=_same_to(first, second, lambda entry: entry.used),
        same_digests_to=_same_to(first, second, lambda entry: entry.digest),
    )


async def compare_runs(a: str, b: str, *, base: Path | str = "runs") -> CompareReport:
    """Compare what `a` and `b` name (`read_entries`), one after the other; raises ConfigError."""
    name_a, entries_a, evaluated_a = await read_side(a, base=base)
    name_b, entries_b, evaluated_b = await read_side(b, base=base)
    report = compare(
        *(name_a, entries_a, name_b, entries_b),
        evaluated_a=evaluated_a,
        evaluated_b=evaluated_b,
        origin_a=read_origin(a, base=base),
        origin_b=read_origin(b, base=base),
    )
    return replace(report, differences=config_differences(read_config(a, base=base), read_config(b, base=base)))


def print_comparison(report: CompareReport) -> None:
    """The table, to stdout."""
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    for side in (report.a.name, report.b.name):
        table.add_column(Text(f"{side}\nfirst"), justify="right")
        table.add_column(Text(f"{side}\nlast"), justify="right")
    table.add_column("change", justify="right")
    for row in report.table:
        table.add_row(*row)
    Console().print(table)
    if report.differences:
        print("configurations differ:")
        for one in report.differences:
            print(f"  {one.key}: {json.dumps(one.a)} | {json.dumps(one.b)}")
    for side in (report.a, report.b):
        if side.origin is not None:
            print(_recorded_words(side.name, side.origin))
    print(f"same batches up to version {report.same_batches_to}, same parameters up to version {report.same_digests_to}")


def _recorded_words(name: str, origin: Origin) -> str:
    kind = f"a branch of {origin.parent} from version {origin.version}" if origin.version else f"a tap of {origin.parent}"
    changed = f", with {' '.join(origin.overrides)}" if origin.overrides else ""
    return f"{name} is {kind}{changed}: its rewards are those recorded with {origin.parent}'s samples, its own policy has earned none"


def _by_number(entries: Sequence[LedgerEntry]) -> dict[int, LedgerEntry]:
    newest = {entry.version.number: entry for entry in sorted(entries, key=lambda entry: entry.version)}
    return dict(sorted(newest.items()))


def _side(name: str, entries: dict[int, LedgerEntry], evaluated: Sequence[Evaluation], origin: Origin | None) -> Side:
    learned = {number: entry for number, entry in entries.items() if entry.source != WARMUP_SOURCE}
    stale = sum(entry.dropped["stale"] for entry in entries.values())
    curves = {metric: _curve(learned, metric) for _, metric in ROWS}
    return Side(name=name, batches=len(learned), stale_rollouts=stale, curves=curves, evaluations=_evaluated(evaluated), origin=origin)


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


_A, _B = "#1f6f8b", "#d1495b"
_PANELS = (
    ("reward", REWARD),
    ("loss", "train/loss"),
    ("staleness (versions)", "staleness/mean"),
    ("importance weight", "train/tis"),
)
_SMOOTHING = 15


def _apart(report: CompareReport) -> tuple[str, str]:
    """The panel that says how a branch has left its parent, where one is compared: ages are its parent's."""
    if report.a.origin is None and report.b.origin is None:
        return "staleness (versions)", "staleness/mean"
    known = any(side.curves[PARENT_DISTANCE].values for side in (report.a, report.b))
    return ("distance to the parent (nats)", PARENT_DISTANCE) if known else ("distance to the sampler (nats)", SAMPLER_DISTANCE)


def write_comparison(report: CompareReport, path: Path) -> None:
    """Draw four panels of both runs into the PNG `path`; raises ConfigError where it cannot be written."""
    # Imported here: it takes half a second, and only this verb needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [_apart(report) if metric == "staleness/mean" else (title, metric) for title, metric in _PANELS]
    for place, (axes, (title, metric)) in enumerate(zip(figure.subplots(2, 2, sharex=True).flat, panels, strict=True)):
        for side, color in ((report.a, _A), (report.b, _B)):
            curve = side.curves[metric]
            axes.plot(curve.numbers, curve.values, color=color, alpha=0.25, linewidth=1)
            label = f"{side.name} (recorded)" if side.origin is not None else side.name
            axes.plot(curve.numbers, smooth(curve.values, _SMOOTHING), color=color, linewidth=2, label=label)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
        axes.set_axisbelow(True)
        if metric == REWARD:
            axes.legend(frameon=False, fontsize=9)
        if place >= 2:
            axes.set_xlabel("version (batches trained)")
    try:
        figure.savefig(path, metadata={"Software": None}, format="png")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}", hint="choose another file with --out") from error
