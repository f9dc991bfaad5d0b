import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.bus.memory.bus import MemoryBus
from streamrl.cli import main
from streamrl.config.load import override
from streamrl.config.tree import BusConfig, Config, DataConfig, RunConfig, TrainerConfig
from streamrl.consumers.training.steps import Cut, recorded_cut
from streamrl.history.branch_fold import parents_cut
from streamrl.history.branch_run import train_branch
from streamrl.history.compare import compare, compare_runs, print_comparison, write_comparison
from streamrl.history.differences import config_differences
from streamrl.history.replay import Range
from streamrl.history.replay_report import differing_choices
from streamrl.history.source import evaluations_in, open_source
from streamrl.schemas.codec import encode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import Choices, LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
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


PACKED = Choices(attention="packed", compiled=True, kept_layers=4, row_length=8192)


def entry(choices: Choices | None, **more: Any) -> LedgerEntry:
    own = {} if choices is None else {"choices": choices}
    return LedgerEntry(run="r", trainer="main", version=Version(0, 1), source="", used=(), cursor=0, granted=9, retired=0, **own, **more)


@pytest.mark.parametrize(
    ("past", "ours", "said"),
    [
        (PACKED, msgspec.structs.replace(PACKED, compiled=False), "compiled: True in the ledger, False here"),
        (PACKED, msgspec.structs.replace(PACKED, row_length=4096), "row_length: 8192 in the ledger, 4096 here"),
        (None, PACKED, "attention: sdpa in the ledger, packed here"),
        (PACKED, msgspec.structs.replace(PACKED, kept_layers=None), ""),
        (None, None, ""),
        # Entries of earlier builds do not say which attention was configured.
        (None, Choices(attention="flash"), ""),
    ],
)
def test_a_version_that_was_computed_otherwise_is_told_so(past: Choices | None, ours: Choices | None, said: str) -> None:
    found = differing_choices(ours, entry(past))
    assert (said in found) if said else found == ""


def test_a_branch_takes_its_parents_choices_only_with_its_budget() -> None:
    beside = entry(PACKED, micro_tokens=8192)
    fold: Any = SimpleNamespace(beside=beside)
    parent, other = (Config(trainer=TrainerConfig(micro_tokens=n)) for n in (16_384, 4096))
    assert parents_cut(fold, parent, parent)(None) == Cut(8192, PACKED)
    assert parents_cut(fold, other, parent)(None) == Cut(0, None)
    own = entry(None, micro_tokens=4096)
    assert parents_cut(fold, other, parent)(own) == recorded_cut(own) == Cut(4096, Choices())


CODE = """
from pathlib import Path

Path({mark!r}).touch()


def advantages(batch, arrays):
    return batch.loss_mask * 1.0
"""


@pytest.mark.parametrize("verb", [["--verify"], ["--set", "trainer.optimizer.learning_rate=0.5", "--name", "b"]])
def test_a_recordings_code_runs_when_trusted(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    mine, mark = tmp_path / "recording", tmp_path / "it-ran"
    shutil.copytree(recorded.path, mine)
    (tmp_path / "evil.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((mine / "config.json").read_text())
    config["loss"]["advantage"] = f"{tmp_path}/evil.py:advantages"
    (mine / "config.json").write_text(json.dumps(config))
    command = ["replay", str(mine), *verb, "--dir", str(tmp_path / "runs")]
    assert main(command) == 1
    assert "--trust-code" in capsys.readouterr().err
    assert not mark.exists()
    main([*command, "--trust-code"])
    assert mark.exists()
