"""Benchmarks whose rounds are each measured both ways: `bench eval`, `gateway`, `hung` and `rewards`, and what all of them refuse."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.bus.plan import BusOptions
from benchmarks.engine.spec import Spec
from benchmarks.evaluation import measure as evaluating
from benchmarks.evaluation import report as of_evaluation
from benchmarks.evaluation.spec import ALONE, EVALUATION, EvaluationSpec, config_of
from benchmarks.gateway import report as of_gateway
from benchmarks.gateway import spec as gateway
from benchmarks.gateway.spec import GatewaySpec
from benchmarks.hung import measure as hanging
from benchmarks.hung import report as of_hung
from benchmarks.hung import spec as hung
from benchmarks.hung.spec import HungSpec
from benchmarks.loop.ways import LoopSpec
from benchmarks.raw import Fact, Raw, Round, new_directory, read, write
from benchmarks.report import render
from benchmarks.rewards import measure as grading
from benchmarks.rewards import report as of_rewards
from benchmarks.rewards import spec as rewards
from benchmarks.rewards.spec import RewardsSpec
from streamrl.cli import main
from streamrl.config.check import check
from streamrl.errors import ConfigError
from tests.bench.known import contend_here, raw_of, small_quickstart

MIB = 1 << 20


def rounds(*measured: tuple[str, dict[str, float]], cell: str = "", number: int = 0) -> list[Round]:
    return [Round(cell=cell, contender=name, round=number, values={"load": 1.0, **values}) for name, values in measured]


def of_eval(slower: float, tokens: int = 4000) -> Raw:
    """Two rounds; an evaluation takes `slower` times as long as the engine alone."""
    found = []
    for number, seconds in enumerate((2.0, 4.0)):
        alone, whole = ({"seconds": seconds * factor, "cpu_s": 1.0, "tokens": tokens} for factor in (1.0, slower))
        found += rounds((ALONE, alone), (EVALUATION, whole), number=number)
    return raw_of("eval", EvaluationSpec(problems=100, n=4, tokens=10), found)


def test_an_evaluation_is_compared_with_the_engine_alone_within_a_round(tmp_path: Path) -> None:
    report = of_evaluation.build_report(of_eval(1.25))
    [target], [held] = report.targets, report.checks
    assert (target.got, target.met, held.held) == ("80.0%", False, True)
    assert of_evaluation.build_report(of_eval(1.02)).targets[0].met is True
    assert "| the engine alone     | 1,500 (1,000 - 2,000)" in render(report)
    assert of_evaluation.build_report(of_eval(1.0, tokens=3999)).checks[0].held is False
    evaluating.measure(EvaluationSpec(problems=5, n=2, tokens=3, slots=8, token_ms=1.0, rounds=1), tmp_path, "streamrl bench eval")
    report = of_evaluation.report_of(tmp_path)
    assert report.checks[0].held and [row.contender for row in report.rows] == [ALONE, EVALUATION]


def test_a_key_of_the_engine_can_be_changed(tmp_path: Path) -> None:
    spec = EvaluationSpec(engine="sglang", model=str(tmp_path), changes=("engine.sglang.gpus=[1]", "engine.slots=3"))
    engine = config_of(spec, tmp_path).engine
    assert (engine.kind, engine.sglang.gpus, engine.slots) == ("sglang", (1,), 3)
    with pytest.raises(ConfigError, match=r"engine\.slot"):
        config_of(replace(spec, changes=("engine.slot=3",)), tmp_path)


def added(seconds: float) -> Raw:
    """Three rounds, each slower than the one before, of a gateway that adds so much."""
    found = []
    for number, p50_s in enumerate((0.001, 0.002, 0.008)):
        engine, all_of_it = ({"p50_s": p50_s + more, "p99_s": 0.02, "calls": 1000.0, "cpu_s": 1.5} for more in (0.0, seconds))
        found += rounds((gateway.ENGINE, engine), (gateway.GATEWAY, all_of_it), number=number)
    facts = [Fact("memory", about, size * MIB) for about, size in {"idle": 90, "open": 100, "used": 103}.items()]
    facts += [Fact("sessions", "opened_s", 2.5), Fact("turns", "stored", 3072)]
    return raw_of("gateway", GatewaySpec(), found, facts)


def test_what_a_gateway_adds_is_compared_within_a_round_and_its_run_has_room(tmp_path: Path) -> None:
    report = of_gateway.build_report(added(0.0025))
    assert [(target.got, target.met) for target in report.targets] == [("2.50 ms", True)]
    assert "103 MiB after 3072 turns" in render(report)
    assert of_gateway.build_report(added(0.004)).targets[0].met is False
    assert of_gateway.build_report(replace(added(0.001), rounds=added(0.001).rounds[:1])).targets[0].met is None
    spec = GatewaySpec()
    config = gateway.config_of(spec, tmp_path)
    check(config)
    credits = (config.tasks.max_staleness + 1) * config.tasks.batch_tasks
    assert credits * gateway.NUM_ROLLOUTS >= spec.sessions
    assert config.model.max_len > spec.calls * spec.rounds / spec.sessions * (spec.tokens + 5) + 16


def hang(samples: int) -> Raw:
    """Three rounds, each slower than the one before; `samples` of 960 come where rollouts hang."""
    found = []
    for number, seconds in enumerate((60.0, 90.0, 120.0)):
        whole, some = ({"seconds": seconds, "batches": 30, "samples": count} for count in (960, samples))
        found += rounds((hung.UNDISTURBED, whole), (hung.HUNG, some), number=number)
    return raw_of("hung", HungSpec(), found)


def test_rates_beside_rollouts_that_hang_are_compared_within_a_round_and_credits_suffice(tmp_path: Path) -> None:
    report = of_hung.build_report(hang(912))
    assert [(target.got, target.met) for target in report.targets] == [("95.0%", True)]
    assert "| 5% of rollouts hang | 10.1 (7.6 - 15.2)" in render(report)
    assert of_hung.build_report(hang(840)).targets[0].met is False
    assert of_hung.build_report(replace(hang(912), rounds=hang(912).rounds[:1])).targets[0].met is None
    write(tmp_path, hang(912).header, hang(912).rounds)
    assert msgspec.json.encode(of_hung.report_of(tmp_path)) == msgspec.json.encode(report)
    spec = HungSpec()
    # 32 slots of 2 s are 16 rollouts or 4 tasks a second; 18.5 % of them hold their credit for 8 s, the others for 2 s.
    held = 4 * (2 + (1 - 0.95**4) * 6)
    tasks = hung.config_of(spec, tmp_path, name="one", hung=spec.hung).tasks
    assert (tasks.max_staleness + 1) * tasks.batch_tasks >= 2 * held
    assert tasks.max_staleness >= 8 * 4 / tasks.batch_tasks
    assert replace(spec, staleness=3).max_staleness == 3


def graded(tokens: int, seconds: float) -> Raw:
    """Two rounds, the second on a machine half as fast; `tokens` of 1000 are trained where graders hang."""
    found = []
    for number, slower in enumerate((1, 2)):
        cold = {"seconds": seconds, "cold_s": 5.0}
        found += rounds((rewards.PLAIN, cold), (rewards.ASYNC, cold), cell=rewards.POOL, number=number)
        whole, some = ({"seconds": 10.0 * slower, "batches": 30, "tokens": count} for count in (1000, tokens))
        found += rounds((rewards.UNDISTURBED, whole), (rewards.HUNG, some), cell=rewards.LOOP, number=number)
    return raw_of("rewards", RewardsSpec(), found)


def test_both_targets_of_rewards_are_judged_and_rates_compared_within_a_round(tmp_path: Path) -> None:
    report = of_rewards.build_report(graded(985, 3.5))
    assert [(target.got, target.met) for target in report.targets] == [("3.50 s", True), ("98.5%", True)]
    assert "1% of graders hang" in render(report)
    assert [target.met for target in of_rewards.build_report(graded(970, 4.1)).targets] == [False, False]
    write(tmp_path, graded(985, 3.5).header, graded(985, 3.5).rounds)
    assert msgspec.json.encode(of_rewards.report_of(tmp_path)) == msgspec.json.encode(report)


RUN: dict[str, tuple[str, list[str]]] = {
    "gateway": ("--rounds 1 --sessions 9 --seconds 0.3", [gateway.ENGINE, gateway.GATEWAY]),
    "hung": ("--rounds 1 --batches 2 --skip 1 --rollout-s 0.1 --limit-s 1 --share 0.2", [hung.UNDISTURBED, hung.HUNG]),
    "rewards": (
        "--rounds 1 --graders 8 --children 1 --batches 2 --skip 1 --share 0.002 --backend table",
        [rewards.PLAIN, rewards.ASYNC, rewards.UNDISTURBED, rewards.HUNG],
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param("gateway", marks=pytest.mark.nats), "hung", pytest.param("rewards", marks=pytest.mark.slow)])
def test_it_runs_from_the_command_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hanging, grading):
        monkeypatch.setattr(module, "contend", contend_here)
    monkeypatch.setattr(rewards, "quickstart", small_quickstart)
    arguments, contenders = RUN[name]
    assert main(["bench", name, *arguments.split(), "--out", str(tmp_path / "out")]) == 0
    assert [one.contender for one in read(tmp_path / "out", name).rounds] == contenders


WRONG: dict[type[msgspec.Struct], list[dict[str, Any]]] = {
    BusOptions: [
        *({"rounds": 0}, {"samples": ()}, {"tokens": (0,)}, {"tokens": (1 << 20,)}, {"max_tasks": 2}, {"round_tokens": 10**9}),
        {"samples": (1024,)},
    ],
    Spec: [{"models": ("huge",)}, {"batches": (0,)}, {"batches": ()}, {"rounds": 0}],
    EvaluationSpec: [{"engine": "sglang"}, {"engine": "vllm"}, {"model": "m"}, {"n": 0}, {"token_ms": -1.0}],
    GatewaySpec: [{"rounds": 0}, {"rate": 0.0}, {"sessions": 0}],
    HungSpec: [{"skip": 40}, {"rounds": 0}, {"hung": 1.0}],
    LoopSpec: [{"batches": 5, "skip": 5}, {"tail_skip": 0}, {"rounds": 0}],
    RewardsSpec: [{"skip": 120}, {"rounds": 0}, {"hung": 1.0}, {"graders": 13}],
}


@pytest.mark.parametrize("spec", WRONG)
def test_what_cannot_be_measured_is_refused_before_anything_starts(spec: type[msgspec.Struct], tmp_path: Path) -> None:
    for wrong in WRONG[spec]:
        with pytest.raises(ConfigError, match="expected"):
            spec(**wrong)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--out: "):
            new_directory(place)
    assert new_directory(tmp_path / "new" / "one").is_dir()
    assert list((tmp_path / "new" / "one").iterdir()) == []
