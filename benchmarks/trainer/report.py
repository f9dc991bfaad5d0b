"""Report, tables and picture of `bench trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.raw import Raw, read
from benchmarks.report import Check, Report, Row, Table, Target, about, bars, picture, rows_of, stacks, write_report
from benchmarks.trainer.spec import Contender, about_cell, cell_name
from streamrl.trainers.flops import CONVENTION

WANTED_MFU = {("0.6B", 1): 0.32, ("4B", 1): 0.45, ("8B", 2): 0.42}
"""Least utilisation by shape and GPUs."""
WANTED_LAYERS_MFU = {("30B-A3B-6", 1): 0.25, ("30B-A3B-6", 2): 0.20}
"""The same of the layers, without the head: a cut model has a head that is too large for it."""
PARTS = ("prepare", "forward", "head", "backward", "ranks", "optimizer", "digest")
_TITLES = {Contender.OURS: "streamrl", Contender.PLAIN: "plain loop", Contender.TRL: "TRL"}
_HEADER = ("model", "answers", "trains", "tokens/s (slowest - fastest step)", "MFU", "peak GiB", "fill", "a rank / plain")
_COLORS = {"prepare": "#8d99ae", "forward": "#1f6f8b", "head": "#2a9d8f", "backward": "#edae49", "ranks": "#adb5bd", "optimizer": "#d1495b"}


def report_of(out: Path) -> Report:
    """Write report, table and `trainer.png` from the raw file; raises DataError when there is none."""
    report, parts = build_report(raw := read(out, "trainer")), _parts(raw)
    write_report(out, report)
    _draw(report, parts, out / "trainer.png")
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    spec, devices = raw.header.spec, raw.named("device")
    peaks = [peak for peak in devices.values() if peak]

    def quantities(values: Mapping[str, float]) -> dict[str, float]:
        rank_s = values["step_s"] * values["ranks"]
        found = {"tokens_per_s": values["tokens"] / values["step_s"], "rank_s": rank_s, "ranks": values["ranks"]}
        found["peak_gib"] = values["peak_bytes"] / 2**30
        if values["positions"]:
            found["fill"] = values["tokens"] / values["positions"]
        if peaks:
            found["mfu"] = values["flops"] / rank_s / peaks[0]
        return found

    rows = rows_of(raw.rounds, quantities, {"ratio": (Contender.PLAIN, "rank_s")})
    left_out = raw.named("left out")
    shown: list[Table | str] = [
        Table(_HEADER, [_cells(row) for row in rows]),
        f"MFU: {CONVENTION}; {_peak_said(devices)}. {_about_batches(raw)} Medians; rounds: {spec['rounds']}, measured steps of each: "
        f"{spec['steps']}. In a round every contender has a process of its own, one after the other, and all have the same batches. Fill: "
        "tokens of the samples over positions of the rows; it is above 100 % where a group's prompt is laid out once.",
    ]
    if parts := _parts(raw):
        shown += [
            Table(("seconds of a step", *PARTS), [_seconds(name, seconds) for name, seconds in parts.items()]),
            "Seconds by part are of one more step, in which the device is waited for at every boundary. `head` is both of its "
            "passes, for TRL a part of `forward`; `prepare` is all that is in no other part.",
        ]
    layers = _of_layers(raw, rows, peaks)
    shown += [f"MFU of the layers, without the head's products and its seconds: {name} {found:.1%}." for name, found in layers.items()]
    shown += [f"{name}: {_settings(chosen)}." for name, chosen in raw.named("settings").items()]
    shown += [f"Left out: {name}: {reason}." for name, reason in left_out.items()]
    ours = [name for name in left_out if name.startswith(f"{Contender.OURS} ")]
    return Report(
        **about(raw.header),
        rows=rows,
        shown=shown,
        targets=_targets(rows, spec, layers),
        checks=[Check("streamrl trained every batch", not ours and _complete(rows, spec), f"{len(spec['answers'])} batches")],
    )


def _complete(rows: Sequence[Row], spec: Mapping[str, Any]) -> bool:
    return sum(row.contender == Contender.OURS for row in rows) == len(spec["answers"]) or Contender.OURS not in spec["contenders"]


def _cells(row: Row) -> list[str]:
    values, (model, _, answers) = row.values, row.cell.partition(", ")
    speed, ranks = values["tokens_per_s"], int(values["ranks"].p50)
    return [
        model,
        answers,
        _TITLES[Contender(row.contender)] + (f", {ranks} ranks" if ranks > 1 else ""),
        f"{speed.p50:,.0f} ({speed.low:,.0f} - {speed.high:,.0f})",
        f"{values['mfu'].p50:.1%}" if "mfu" in values else "-",
        f"{values['peak_gib'].p50:.1f}",
        f"{values['fill'].p50:.1%}" if "fill" in values else "-",
        f"{values['ratio'].p50:.2f}" if "ratio" in values else "-",
    ]


def _peak_said(devices: Mapping[str, float | None]) -> str:
    said = [f"peak of {name} {peak / 1e12:g} TFLOP/s" if peak else f"no peak is known of {name}" for name, peak in devices.items()]
    return ", ".join(said) or "no device"


def _about_batches(raw: Raw) -> str:
    found: dict[str, str] = {}
    for one in raw.rounds:
        values = one.values
        found[one.cell] = (
            f"{values['samples']:.0f} samples with {values['tokens']:,.0f} tokens, {values['trained']:,.0f} of them trained "
            f"({values['flops'] / 1e12:,.3g} TFLOP)"
        )
    return " ".join(f"Answers of {cell.partition(', ')[2]} tokens on average: {text}." for cell, text in found.items())


def _parts(raw: Raw) -> dict[str, dict[str, float]]:
    return {about: dict(seconds) for about, seconds in raw.named("parts").items()}


def _of_layers(raw: Raw, rows: Sequence[Row], peaks: Sequence[float]) -> dict[str, float]:
    """Utilisation without the head by contender and cell, where its seconds are known: those of the step that was taken apart."""
    parts, found = _parts(raw), dict[str, float]()
    work = {one.cell: one.values["flops"] - one.values["head_flops"] for one in raw.rounds if "head_flops" in one.values}
    for row in rows:
        name, rank_s, ranks = about_cell(row.contender, row.cell), row.values["rank_s"].p50, row.values["ranks"].p50
        head_s = parts.get(name, {}).get("head")
        if peaks and head_s is not None and row.cell in work:
            found[name] = work[row.cell] / (rank_s - head_s * ranks) / peaks[0]
    return found


def _seconds(name: str, seconds: Mapping[str, float]) -> list[str]:
    return [name, *(f"{seconds[part]:.3f}" if part in seconds else "-" for part in PARTS)]


def _settings(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _targets(rows: Sequence[Row], spec: Mapping[str, Any], layers: Mapping[str, float]) -> list[Target]:
    ours = [row for row in rows if row.contender == Contender.OURS]
    ratios = {row.cell: row.values["ratio"].p50 for row in ours if "ratio" in row.values}
    slower = [f"{cell} ({ratio:.2f})" for cell, ratio in ratios.items() if ratio < 1]
    alone = [f"{mean}: nothing to compare with" for mean in spec["answers"] if cell_name(spec["shape"], mean) not in ratios]
    said = slower or ([", ".join(f"{ratio:.2f}" for ratio in ratios.values())] if ratios else [])
    met = False if slower else None if alone else True
    targets = [Target("speed of a rank over the plain loop's, every batch", ">= 1", "; ".join([*said, *alone]), met)]
    # They were set for the shorter answers.
    key, shortest = (spec["shape"], spec["ranks"]), cell_name(spec["shape"], min(spec["answers"]))
    whole = next((row.values["mfu"].p50 for row in ours if row.cell == shortest and "mfu" in row.values), None)
    of_layers = layers.get(about_cell(Contender.OURS, shortest))
    for name, wanted, got in (("MFU", WANTED_MFU.get(key), whole), ("MFU of the layers", WANTED_LAYERS_MFU.get(key), of_layers)):
        if wanted is not None:
            said, met = ("-", None) if got is None else (f"{got:.1%}", got >= wanted)
            targets.append(Target(f"{name}, {spec['shape']}", f">= {wanted:.0%}", said, met))
    return targets


def _draw(report: Report, parts: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Tokens a second of each batch and contender, and where a step's time goes."""
    with picture(path, (10, 1.2 + 0.32 * max(2, len(report.rows)))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
        names = [f"{_TITLES[Contender(row.contender)]} ({row.cell})" for row in report.rows]
        colors = ["#1f6f8b" if row.contender == Contender.OURS else "#adb5bd" for row in report.rows]
        bars(left, names, [row.values["tokens_per_s"] for row in report.rows], colors, "tokens/s", size=7)
        shades = {part: _COLORS.get(part, "#ced4da") for part in PARTS}
        stacks(right, list(parts), list(parts.values()), shades, "seconds of a step, by part", size=7)
