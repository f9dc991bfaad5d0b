import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.raw import append
from benchmarks.report import marks, render, write_between
from benchmarks.weights.options import Options
from benchmarks.weights.picture import write_timeline
from benchmarks.weights.records import read_raw
from benchmarks.weights.report import build_report, render_several
from benchmarks.weights.stats import blocks_of, clock_offset_s, gaps_of, p50, p99, ratio, spread, token_gaps_ms, within
from streamrl.errors import DataError
from tests.bench import events
from tests.support.errors import raises

CUT = "requests aborted, retracted, prefilled again or failed"


@pytest.fixture(scope="module")
def raw():
    return events.raw()


@pytest.fixture(scope="module")
def report(raw):
    return build_report(raw, resamples=100)


def row(report, title):
    return next(one for one in report.rows if one.title == title)


@pytest.mark.parametrize(
    ("of", "change", "check"),
    [
        ("updates", {"forwards": [100, 101]}, "all ranks commit before the same forward pass"),
        ("updates", {"served_digest": ["ab", "cd"]}, "served digest = manifest digest on every rank"),
        ("updates", {"error": "refused"}, "every update of ours was committed"),
        ("requests", {"versions": [(2, 400), (1, 500)]}, "a request's versions never go back"),
        ("requests", {"versions": [(1, 400)]}, "every token is stamped with its version"),
    ],
)
def test_a_planted_fault_fails_its_check(raw, of, change, check):
    first, *others = getattr(raw, of)
    report = build_report(replace(raw, **{of: [replace(first, **change), *others]}), resamples=10)
    assert [one.name for one in report.checks if not one.held] == [check]


def write_raw(out, raw):
    # As a run does: first what the load's process saw, then the rest.
    append(out, [*raw.requests, raw.tokens])
    append(out, [raw.header, raw.run, *raw.updates, *raw.forwards])


def test_the_raw_file_gives_the_same_report(raw, report, tmp_path):
    write_raw(tmp_path, raw)
    again = build_report(read_raw(tmp_path), resamples=100)
    assert msgspec.json.encode(again) == msgspec.json.encode(report)
    assert render(again) == render(report)


@pytest.mark.parametrize("kept", [0, 0.3, 0.9999])
def test_half_a_file_is_an_error(raw, tmp_path, kept):
    write_raw(tmp_path, raw)
    file = tmp_path / "raw.jsonl"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with raises(DataError, directory=str(tmp_path), benchmark="weights"):
        read_raw(tmp_path)


def test_what_is_missing_of_a_file_is_said(tmp_path, raw):
    with raises(DataError, directory=str(tmp_path), benchmark="weights") as raised:
        read_raw(tmp_path)
    assert "--out" in raised.value.hint
    append(tmp_path, [raw.header, raw.run, *raw.updates, *raw.forwards])
    with raises(DataError, counts=(1, 0, 2)):
        read_raw(tmp_path)


@pytest.mark.process  # matplotlib asks fc-list once on a machine
def test_the_picture_is_drawn(raw, tmp_path):
    write_timeline(raw, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").stat().st_size > 20_000


def test_gaps_and_intervals(raw):
    # In these events a pass ends at gpu_ms after second 99, and the second next one is launched 16 ms later.
    assert clock_offset_s(raw.forwards[0].host_s, raw.forwards[0].gpu_ms) == pytest.approx(99 + 0.016, abs=0.002)
    gaps = gaps_of(events.forwards(3))
    few = ratio(blocks_of(gaps, [(100, 102)]), blocks_of(gaps, [(103, 105)]), p50)
    many = ratio(blocks_of(gaps, [(100, 110)]), blocks_of(gaps, [(110, 120)]), p50)
    assert few is not None and many is not None
    assert few.high - few.low > many.high - many.low
    assert ratio([], blocks_of(gaps, [(100, 102)]), p99) is None
    tokens = replace(
        raw.tokens,
        lane=np.array([0, 1, 0, 1, 0]),
        request=np.array([0, 0, 0, 0, 1]),
        at_s=np.array([1.0, 1.1, 1.5, 1.7, 9.0]),
        count=np.ones(5, np.int64),
    )
    assert token_gaps_ms(tokens, 0.0, 10.0) == pytest.approx([500, 600])
    assert token_gaps_ms(tokens, 1.6, 10.0) == pytest.approx([600])
    assert np.isnan(spread(np.empty(0)).p99)
    assert within(np.array([1.0, 2.0, 3.0]), [(2.0, 3.0)]).tolist() == [False, True, False]


def test_several_runs_share_one_table_in_a_document(report, tmp_path):
    document = tmp_path / "weights.md"
    begin, end = marks("weights")
    document.write_text(f"# Weights\n\n{begin}\nold\n{end}\n\nMore.\n")
    write_between(document, "weights", render_several([report, report]))
    text = document.read_text()
    assert text.startswith(f"# Weights\n\n{begin}\n\n| model") and text.endswith(f"{end}\n\nMore.\n") and "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("| 8B, TP 2")]
    assert len(lines) == 2 * len(report.rows)
    assert [line.split("|")[2].strip() for line in lines[:2]] == ["no update", "ours: flip, unpaced, 1 s"]
    document.write_text("# No marks\n")
    with raises(DataError, path=str(document)):
        write_between(document, "weights", "text")


def test_targets_are_missed_by_aborts_and_not_judged_on_a_cpu(raw, report):
    report = build_report(replace(raw, run=replace(raw.run, device="CPU")), resamples=10)
    assert [target.name for target in report.targets if target.met is not None] == [CUT]
    broken = [replace(raw.requests[0], finish="abort", retractions=2), *raw.requests[1:]]
    report = build_report(replace(raw, requests=broken), resamples=10)
    assert (report.requests.aborted, report.requests.retracted, report.requests.cut) == (1, 2, 3)
    assert [one.name for one in report.targets if not one.met] == [CUT]
    assert report.requests.prefilled_again == 0
    forwards = raw.forwards[0]
    again = forwards.extend.copy()
    again[1000:1010] = True
    broken = [replace(forwards, extend=again), *raw.forwards[1:]]
    found = build_report(replace(raw, forwards=broken), resamples=10)
    assert found.requests.prefilled_again > 0
    assert CUT in [target.name for target in found.targets if not target.met]


def test_windows_have_what_was_planted(report):
    steady = row(report, "steady")
    assert steady.gap.p50 == pytest.approx(events.STEP_MS, rel=0.01)
    assert steady.tokens_per_s == pytest.approx(events.ROWS / events.STEP_MS * 1e3, rel=0.01)
    assert steady.seconds == 20 and steady.updates == 0 and steady.gap_p99_ratio is None
    ours = row(report, "paced, 1 s")
    assert ours.updates == 10
    assert ours.publish_to_commit.p50 == pytest.approx(35)
    assert ours.blocked.p50 == pytest.approx(2)
    assert ours.gigabytes_per_s == pytest.approx(100)
    assert ours.wire_bytes == 6_000_000_000
    assert ours.commit.max == 0.2
    assert ours.gap_p99_ratio.low < 1 < ours.gap_p99_ratio.high
    assert ours.gap_p99_ratio.high - ours.gap_p99_ratio.low < 0.02
    stock = row(report, "tensor, 0.5 s")
    assert stock.gap.max == pytest.approx(events.STEP_MS + events.PAUSE_MS, rel=0.05)
    assert stock.gap_during.p99 > 40
    assert stock.gap_p99_ratio.low > 3
    assert stock.tokens_ratio.high < 0.98
    assert report.noise.gap_p99_ratio.value == pytest.approx(1, rel=0.02)
    met = {target.name: target.met for target in report.targets}
    assert all(met.values())
    assert all(check.held for check in report.checks)
    assert (report.requests.mixed, report.requests.most_versions) == (1, 2)
    assert "2 versions in one" in render(report)
    text = render(report)
    for name in ("no update", "ours: flip, paced, 1 s", "stock: pause + tensor, 0.5 s"):
        assert f"| {name} " in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) <= 4
    assert "NO" not in text.replace("NOT", "")


def test_windows_are_compared_one_by_one_and_memory_is_shown_at_each_moment(raw, report):
    assert report.steady.windows == 4
    low, high = report.steady.gap_p99
    assert 0.97 < low < 1 < high < 1.03
    slow = replace(raw.forwards[0], gpu_ms=raw.forwards[0].gpu_ms + np.maximum(0, raw.forwards[0].host_s - 138) * 1e3)
    found = build_report(replace(raw, forwards=[slow, *raw.forwards[1:]]), resamples=10)
    assert found.steady is not None
    assert found.steady.gap_p50[1] == pytest.approx(2, rel=0.02)
    assert found.steady.tokens_per_s[0] == pytest.approx(0.5, rel=0.02)
    memory = [{"moment": "server started", "cuda:0": 77_000_000_000, "cuda:1": 500_000_000}, {"moment": "after the last window"}]
    run = replace(raw.run, gpu_memory=memory)
    header = events.header(Options(max_gap_ms=0.5))
    text = render(build_report(replace(raw, header=header, run=run), resamples=10))
    [row] = [line for line in text.splitlines() if "server started" in line]
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["77.0", "0.5"]
    assert "0.5 ms of copying" in text
