"""The report of `bench bus` from numbers that are known."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.bus.plan import Cell, Transport
from benchmarks.bus.report import build_report, report_of
from benchmarks.machine import Machine
from benchmarks.raw import Fact, Header, Raw, Round, read, write
from benchmarks.report import Row, marks, render, write_between
from streamrl.errors import DataError, LaunchError
from tests.support.errors import raises

TASKS = 10


def measured(transport: Transport, cell: Cell, number: int, tokens_per_s: float, messages: int = TASKS) -> Round:
    samples = TASKS * cell.samples
    tokens = samples * cell.tokens
    cpu = {"producer_s": tokens * 10e-9, "server_s": tokens * 20e-9, "consumer_s": tokens * 30e-9}
    counts = {"tasks": TASKS, "messages": messages, "samples": samples, "tokens": tokens, "nbytes": 9 * tokens}
    return Round(cell=cell.name, contender=transport, round=number, values={"wall_s": tokens / tokens_per_s, **cpu, **counts})


@pytest.fixture
def run() -> Raw:
    large, middle = Cell(64, 2048), Cell(8, 2048)
    found = [measured(Transport.STREAMRL, large, number, speed, messages=2 * TASKS) for number, speed in enumerate((15e6, 9e6, 12e6))]
    for number, (ours, other) in enumerate(((8e6, 4e6), (9e6, 3e6), (1e6, 1e6))):
        found += [measured(Transport.REDIS_ORJSON, middle, number, other), measured(Transport.STREAMRL, middle, number, ours)]
    facts = Machine(processor="a processor", cores=2, python="3.11", packages={"redis": "8"}, date="2026-11-21", load=0.5)
    header = Header(benchmark="bus", command="streamrl bench bus --rounds 3", machine=facts, spec={"rounds": 3})
    return Raw(header=header, rounds=found, facts=[Fact("left out", "ray", "no Python package ray: pip install 'streamrl[ray]'")])


def medians(row: Row, *names: str) -> list[float]:
    return [row.values[name].p50 for name in names]


def test_medians_ratios_and_targets(run: Raw) -> None:
    report = build_report(run)
    assert [(row.cell, row.contender) for row in report.rows] == [
        ("8 x 2k", Transport.STREAMRL),
        ("8 x 2k", Transport.REDIS_ORJSON),
        ("64 x 2k", Transport.STREAMRL),
    ]
    _, redis, large = report.rows
    speed = large.values["tokens_per_s"]
    assert (speed.p50, speed.low, speed.high) == pytest.approx((12e6, 9e6, 15e6))
    assert large.rounds == 3
    assert medians(large, "samples_per_s", "messages", "body_bytes") == pytest.approx([12e6 / 2048, 2, 9])
    assert medians(large, "producer_ns", "server_ns", "consumer_ns") == pytest.approx([10, 20, 30])
    # A ratio is one of speeds of the same round, not of medians.
    ratio = redis.values["ratio"]
    assert (ratio.p50, ratio.low, ratio.high) == pytest.approx((2, 1, 3))
    assert [(target.got, target.met) for target in report.targets] == [("12,000,000", True), ("2.00", True)]
    only = [one for one in run.rounds if one.cell == "8 x 2k" and one.contender == Transport.STREAMRL]
    report = build_report(msgspec.structs.replace(run, rounds=only))
    assert [target.met for target in report.targets] == [None, None]
    slow = build_report(msgspec.structs.replace(run, rounds=[measured(Transport.STREAMRL, Cell(64, 2048), 0, 9.9e6)]))
    assert [target.met for target in slow.targets] == [False, None]
    assert "| NO " in render(slow) and "| not measured |" in render(slow)
    text = render(build_report(run))
    assert "| 64 x 2k          | streamrl     | 5,859     | 12.0 (9.00 - 15.0)" in text
    assert "| 2.00 (1.00 - 3.00) |" in text
    assert "| 10.0 + 20.0 + 30.0 = 60.0" in text
    assert "Left out: ray: " in text
    assert "`streamrl bench bus --rounds 3`" in text and "2 cores, load before 0.5" in text and "2026-11-21" in text


def test_files_are_made_from_the_raw_one(run: Raw, tmp_path: Path) -> None:
    write(tmp_path, run.header, [*run.facts, *run.rounds])
    report = report_of(tmp_path)
    assert report == build_report(run)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes())["rows"][0]["contender"] == "streamrl"
    assert (tmp_path / "table.md").read_text() == render(report)
    assert (tmp_path / "bus.png").read_bytes().startswith(b"\x89PNG")
    document = tmp_path / "bus.md"
    begin, end = marks("bus")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for _ in range(2):
        write_between(document, "bus", render(report))
        assert document.read_text() == f"before\n{begin}\n\n{render(report)}\n{end}\nafter\n"


def test_without_files_or_marks_there_is_a_clear_error_and_what_was_measured_until_one_is_kept(run: Raw, tmp_path: Path) -> None:
    with raises(DataError, directory=str(tmp_path), benchmark="bus"):
        report_of(tmp_path)
    (tmp_path / "bus.md").write_text("no marks")
    with raises(DataError, path=str(tmp_path / "bus.md")):
        write_between(tmp_path / "bus.md", "bus", render(build_report(run)))

    def records() -> Iterator[Round]:
        yield from run.rounds[:2]
        raise LaunchError("the server died")

    with pytest.raises(LaunchError):
        write(tmp_path, run.header, records())
    assert read(tmp_path, "bus") == msgspec.structs.replace(run, rounds=run.rounds[:2], facts=[])
    with raises(DataError, directory=str(tmp_path), benchmark="loop"):
        read(tmp_path, "loop")


@pytest.mark.parametrize(("broken", "said"), [(b'{"type":"round"', "line 1"), (b'{"type":"window"}\n', "line 1"), (b"", "headers of")])
def test_a_broken_file_is_an_error(broken: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_bytes(broken)
    with pytest.raises(DataError, match=said):
        read(tmp_path, "bus")
