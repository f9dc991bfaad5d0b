"""The report of `bench bus` from numbers that are known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.bus.outcome import BEGIN, END, report_from, write_docs
from benchmarks.bus.plan import Cell, Transport
from benchmarks.bus.records import BusRun, Measured
from benchmarks.bus.report import build_report, render
from benchmarks.machine import Machine
from streamrl.errors import DataError

TASKS = 10


def measured(transport: Transport, cell: Cell, number: int, tokens_per_s: float, messages: int = TASKS) -> Measured:
    samples = TASKS * cell.samples
    tokens = samples * cell.tokens
    cpu = {"producer_s": tokens * 10e-9, "server_s": tokens * 20e-9, "consumer_s": tokens * 30e-9}
    counts = {"tasks": TASKS, "messages": messages, "samples": samples, "tokens": tokens, "nbytes": 9 * tokens}
    return Measured(transport=transport, cell=cell, round=number, wall_s=tokens / tokens_per_s, **cpu, **counts)


@pytest.fixture
def run() -> BusRun:
    large, middle = Cell(64, 2048), Cell(8, 2048)
    found = [measured(Transport.STREAMRL, large, number, speed, messages=2 * TASKS) for number, speed in enumerate((15e6, 9e6, 12e6))]
    for number, (ours, other) in enumerate(((8e6, 4e6), (9e6, 3e6), (1e6, 1e6))):
        found += [measured(Transport.STREAMRL, middle, number, ours), measured(Transport.REDIS_ORJSON, middle, number, other)]
    facts = Machine(processor="a processor", cores=2, python="3.11", packages={"redis": "8"}, date="2026-11-21", load=0.5)
    return BusRun(machine=facts, rounds=3, left_out={"ray": "no Python package ray: pip install 'streamrl[ray]'"}, measured=found)


def test_medians_ratios_and_targets(run: BusRun) -> None:
    report = build_report(run)
    assert [(row.cell, row.transport) for row in report.rows] == [
        (Cell(8, 2048), Transport.STREAMRL),
        (Cell(8, 2048), Transport.REDIS_ORJSON),
        (Cell(64, 2048), Transport.STREAMRL),
    ]
    ours, redis, large = report.rows
    assert (large.tokens_per_s.p50, large.tokens_per_s.low, large.tokens_per_s.high) == pytest.approx((12e6, 9e6, 15e6))
    assert large.samples_per_s.p50 == pytest.approx(12e6 / 2048)
    assert (large.messages, large.body_bytes, large.rounds) == (2, 9, 3)
    assert (large.producer_ns, large.server_ns, large.consumer_ns) == pytest.approx((10, 20, 30))
    # A ratio is one of speeds of the same round, not of medians.
    assert redis.ratio is not None and (redis.ratio.p50, redis.ratio.low, redis.ratio.high) == pytest.approx((2, 1, 3))
    assert ours.ratio is None and large.ratio is None
    assert [(target.got, target.met) for target in report.targets] == [(pytest.approx(12e6), True), (pytest.approx(2), True)]


def test_a_target_that_was_not_measured_is_not_met_nor_missed(run: BusRun) -> None:
    only = [one for one in run.measured if one.cell.samples == 8 and one.transport is Transport.STREAMRL]
    report = build_report(msgspec.structs.replace(run, measured=only))
    assert [target.met for target in report.targets] == [None, None]
    slow = build_report(msgspec.structs.replace(run, measured=[measured(Transport.STREAMRL, Cell(64, 2048), 0, 9.9e6)]))
    assert [target.met for target in slow.targets] == [False, None]
    assert "| NO " in render(slow) and "| not measured |" in render(slow)


def test_the_table_says_what_was_measured_and_what_was_left_out(run: BusRun) -> None:
    text = render(build_report(run))
    assert "| 64 x 2k          | streamrl     | 5,859     | 12.0 (9.00 - 15.0)" in text
    assert "| 2.00 (1.00 - 3.00) |" in text
    assert "| 10.0 + 20.0 + 30.0 = 60.0" in text
    assert "Left out: ray: no Python package ray" in text
    assert "a processor, 2 cores, load before 0.5" in text and "2026-11-21" in text


def test_files_are_made_from_the_raw_one(run: BusRun, tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_bytes(msgspec.json.encode(run))
    report = report_from(tmp_path)
    assert report == build_report(run)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes())["rows"][0]["transport"] == "streamrl"
    assert (tmp_path / "table.md").read_text() == render(report)
    assert (tmp_path / "bus.png").read_bytes().startswith(b"\x89PNG")
    document = tmp_path / "bus.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_docs(document, report)
        assert document.read_text() == f"before\n{BEGIN}\n\n{render(report)}\n{END}\nafter\n"


def test_without_files_or_marks_there_is_a_clear_error(run: BusRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the raw file of a bus benchmark"):
        report_from(tmp_path)
    (tmp_path / "bus.md").write_text("no marks")
    with pytest.raises(DataError, match="expected the marks"):
        write_docs(tmp_path / "bus.md", build_report(run))
