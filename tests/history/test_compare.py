from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.memory.bus import MemoryBus
from streamrl.config.load import override
from streamrl.config.tree import BusConfig, Config, DataConfig, RunConfig
from streamrl.history.branch_run import train_branch
from streamrl.history.compare import compare, compare_runs, print_comparison, write_comparison
from streamrl.history.differences import config_differences
from streamrl.history.replay import Range
from streamrl.history.source import evaluations_in, open_source
from streamrl.schemas.codec import encode
from streamrl.schemas.events import Event
from streamrl.schemas.subjects import Subjects
from tests.support.recorded_run import Recorded


async def test_a_run_and_its_branch(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_source(str(recorded.path)) as source:
        run, _ = await train_branch(source, overrides=["trainer.optimizer.learning_rate=0.05"], name="fast", base=tmp_path, span=Range())
    report = await compare_runs(str(recorded.path), run.name, base=tmp_path)
    warmup = sum(e.source == "warmup" for e in recorded.ledger)
    assert report.same_batches_to == len(recorded.ledger)
    assert report.same_digests_to == warmup
    assert (report.a.batches, report.b.batches) == (len(recorded.ledger) - warmup,) * 2
    assert report.a.curves["rollout/raw_reward"] == report.b.curves["rollout/raw_reward"], "the rewards are in the recording"
    assert report.a.curves["train/grad_norm"].numbers == tuple(range(warmup + 1, len(recorded.ledger) + 1))
    by_title = {row[0]: row[1:] for row in report.table}
    assert by_title["reward"][-1] == "0" and by_title["tis"][-1] != "0", "other parameters weigh the same samples otherwise"
    print_comparison(report)
    before = recorded.config.trainer.optimizer.learning_rate
    assert f"configurations differ:\n  trainer.optimizer.learning_rate: {before} | 0.05\n" in capsys.readouterr().out
    assert (await compare_runs(str(recorded.path), str(recorded.path), base=tmp_path)).differences == ()
    write_comparison(report, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_where_runs_part_is_found_by_their_newest_entries(recorded: Recorded) -> None:
    late = [replace(e, digest="x") if e.version.number > 15 else e for e in recorded.ledger[9:]]
    report = compare("a", recorded.ledger, "b", late)
    assert (report.same_batches_to, report.same_digests_to) == (len(recorded.ledger), 15)
    forked = [replace(e, version=replace(e.version, epoch=1), digest="x") for e in recorded.ledger if e.version.number == 9]
    report = compare("a", recorded.ledger, "b", [*recorded.ledger, *forked])
    assert report.same_digests_to == 8 and report.b.batches == report.a.batches


def test_a_schedule_of_the_same_length_is_the_same_whether_that_is_said_or_not() -> None:
    config = Config(run=RunConfig(steps=40), data=DataConfig(train="x"))
    assert config_differences(config, override(config, ["trainer.optimizer.decay_steps=40"])) == ()
    [other] = config_differences(config, override(config, ["trainer.optimizer.decay_steps=50"]))
    assert (other.key, other.a, other.b) == ("trainer.optimizer.decay_steps", 40, 50)


async def test_sets_of_problems_stand_side_by_side() -> None:
    bus, subject = MemoryBus("run", BusConfig()), Subjects("run").events("evaluation")
    for name, number, accuracy, passed in (("sums", 1, 0.25, 0.5), ("sums", 3, 0.5, 0.75), ("words", 3, None, None)):
        rates = {} if passed is None else {k: {"value": value, "problems": 4} for k, value in (("1", accuracy), ("8", passed))}
        detail = {"set": name, "version": f"0.{number}", "accuracy": accuracy, "num": 4, "pass": rates}
        await bus.publish(subject, encode(Event(kind="evaluation", worker="evaluator-0", detail=detail)))
    await bus.publish(subject, encode(Event(kind="evaluation", worker="x", detail={"version": []})))
    await bus.publish(Subjects("run").events("notice"), encode(Event(kind="notice", worker="x", detail={})))
    found = await evaluations_in(bus, Subjects("run"))
    assert [(one.set, one.accuracy, one.passes) for one in found] == [
        ("sums", 0.25, {1: 0.25, 8: 0.5}),
        ("sums", 0.5, {1: 0.5, 8: 0.75}),
        ("words", None, {}),
    ]
    rows = {row[0]: row[1:] for row in compare("a", [], "b", [], evaluated_a=found, evaluated_b=found[:1]).table}
    assert rows["eval sums"] == ("0.25", "0.5", "0.25", "0.25", "-0.25")
    assert rows["eval sums pass@8"] == ("", "0.75", "", "0.5", "-0.25")
    assert rows["eval words"] == ("-", "-", "-", "-", "-")
