from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.hung import measure
from benchmarks.hung.report import build_report, report_of
from benchmarks.hung.spec import HUNG, UNDISTURBED, HungSpec, config_of
from benchmarks.raw import Raw, Round, read, write
from benchmarks.report import render
from streamrl.cli import main
from tests.bench.known import contend_here, raw_of


def raw(samples: int) -> Raw:
    """Three rounds, each slower than the one before; `samples` of 960 come where rollouts hang."""
    rounds: list[Round] = []
    for number, seconds in enumerate((60.0, 90.0, 120.0)):
        for label, count in ((UNDISTURBED, 960), (HUNG, samples)):
            values = {"seconds": seconds, "batches": 30, "samples": count, "load": 1.0}
            rounds.append(Round(cell="", contender=label, round=number, values=values))
    return raw_of("hung", HungSpec(), rounds)


def test_the_rate_is_compared_within_a_round(tmp_path: Path) -> None:
    report = build_report(raw(912))
    [target] = report.targets
    assert (target.got, target.met) == ("95.0%", True)
    assert "| 5% of rollouts hang | 10.1 (7.6 - 15.2)" in render(report)
    assert build_report(raw(840)).targets[0].met is False
    assert build_report(replace(raw(912), rounds=raw(912).rounds[:1])).targets[0].met is None
    write(tmp_path, raw(912).header, raw(912).rounds)
    assert msgspec.json.encode(report_of(tmp_path)) == msgspec.json.encode(report)


def test_credits_suffice_by_the_rule_and_groups_are_young_enough(tmp_path: Path) -> None:
    spec = HungSpec()
    # 32 slots of 2 s are 16 rollouts or 4 tasks a second; 18.5 % of them hold their credit for 8 s, the others for 2 s.
    held = 4 * (2 + (1 - 0.95**4) * 6)
    config = config_of(spec, tmp_path, name="one", hung=spec.hung)
    assert (config.tasks.max_staleness + 1) * config.tasks.batch_tasks >= 2 * held
    assert config.tasks.max_staleness >= 8 * 4 / config.tasks.batch_tasks
    assert replace(spec, staleness=3).max_staleness == 3


@pytest.mark.process
def test_it_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "contend", contend_here)
    out = tmp_path / "out"
    arguments = "--rounds 1 --batches 2 --skip 1 --rollout-s 0.1 --limit-s 1 --share 0.2"
    assert main(["bench", "hung", *arguments.split(), "--out", str(out)]) == 0
    assert [one.contender for one in read(out, "hung").rounds] == [UNDISTURBED, HUNG]
