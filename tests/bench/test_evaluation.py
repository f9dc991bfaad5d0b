from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.evaluation.measure import measure
from benchmarks.evaluation.report import build_report, report_of
from benchmarks.evaluation.spec import ALONE, EVALUATION, EvaluationSpec, config_of
from benchmarks.raw import Raw, Round
from benchmarks.report import render
from streamrl.errors import ConfigError
from tests.bench.known import raw_of


def raw(slower: float) -> Raw:
    """Two rounds; an evaluation takes `slower` times as long as the engine alone."""
    spec = EvaluationSpec(problems=100, n=4, tokens=10)
    rounds = [
        Round(cell="", contender=name, round=number, values={"seconds": seconds * factor, "cpu_s": 1.0, "tokens": 4000, "load": 1.0})
        for number, seconds in enumerate((2.0, 4.0))
        for name, factor in ((ALONE, 1.0), (EVALUATION, slower))
    ]
    return raw_of("eval", spec, rounds)


def test_speeds_are_compared_within_a_round() -> None:
    report = build_report(raw(1.25))
    [target], [check] = report.targets, report.checks
    assert (target.got, target.met, check.held) == ("80.0%", False, True)
    assert build_report(raw(1.02)).targets[0].met is True
    assert "| the engine alone     | 1,500 (1,000 - 2,000)" in render(report)
    lost = raw(1.0)
    lost = replace(lost, rounds=[replace(one, values=one.values | {"tokens": 3999}) for one in lost.rounds])
    assert build_report(lost).checks[0].held is False


def test_a_short_one_gives_every_sample(tmp_path: Path) -> None:
    spec = EvaluationSpec(problems=5, n=2, tokens=3, slots=8, token_ms=1.0, rounds=1)
    measure(spec, tmp_path, "streamrl bench eval")
    report = report_of(tmp_path)
    assert report.checks[0].held
    assert [row.contender for row in report.rows] == [ALONE, EVALUATION]


def test_a_key_of_the_engine_can_be_changed(tmp_path: Path) -> None:
    spec = EvaluationSpec(engine="sglang", model=str(tmp_path), changes=("engine.sglang.gpus=[1]", "engine.slots=3"))
    engine = config_of(spec, tmp_path).engine
    assert (engine.kind, engine.sglang.gpus, engine.slots) == ("sglang", (1,), 3)
    with pytest.raises(ConfigError, match=r"engine\.slot"):
        config_of(replace(spec, changes=("engine.slot=3",)), tmp_path)
