from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.raw import Raw, Round, read, write
from benchmarks.report import render
from benchmarks.rewards import measure, spec
from benchmarks.rewards.report import build_report, report_of
from benchmarks.rewards.spec import ASYNC, HUNG, LOOP, PLAIN, POOL, UNDISTURBED, RewardsSpec
from streamrl.cli import main
from tests.bench.known import contend_here, raw_of, small_quickstart


def raw(tokens: int, seconds: float) -> Raw:
    """Two rounds, the second on a machine half as fast; `tokens` of 1000 are trained where graders hang."""
    rounds: list[Round] = []
    for number, slower in enumerate((1, 2)):
        for label in (PLAIN, ASYNC):
            rounds.append(Round(cell=POOL, contender=label, round=number, values={"seconds": seconds, "cold_s": 5.0, "load": 1.0}))
        for label, count in ((UNDISTURBED, 1000), (HUNG, tokens)):
            values = {"seconds": 10.0 * slower, "batches": 30, "tokens": count, "load": 1.0}
            rounds.append(Round(cell=LOOP, contender=label, round=number, values=values))
    return raw_of("rewards", RewardsSpec(), rounds)


def test_both_targets_are_judged_and_rates_compared_within_a_round(tmp_path: Path) -> None:
    report = build_report(raw(985, 3.5))
    assert [(target.got, target.met) for target in report.targets] == [("3.50 s", True), ("98.5%", True)]
    assert "1% of graders hang" in render(report)
    assert [target.met for target in build_report(raw(970, 4.1)).targets] == [False, False]
    write(tmp_path, raw(985, 3.5).header, raw(985, 3.5).rounds)
    assert msgspec.json.encode(report_of(tmp_path)) == msgspec.json.encode(report)


@pytest.mark.process
@pytest.mark.slow
def test_it_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "contend", contend_here)
    monkeypatch.setattr(spec, "quickstart", small_quickstart)
    out = tmp_path / "out"
    arguments = "--rounds 1 --graders 8 --children 1 --batches 2 --skip 1 --share 0.002 --backend table"
    assert main(["bench", "rewards", *arguments.split(), "--out", str(out)]) == 0
    assert [one.contender for one in read(out, "rewards").rounds] == [PLAIN, ASYNC, UNDISTURBED, HUNG]
