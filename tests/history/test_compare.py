"""Runs, branches and recordings held against each other, and back-tests of a stream whose times are written by hand."""

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
from streamrl.core.fold_config import fold_config
from streamrl.core.records import Rollouts, RolloutView
from streamrl.core.state import FoldConfig
from streamrl.errors import ConfigError
from streamrl.history.backtest import Arrival, History, backtest, backtest_grid, print_backtest, read_history
from streamrl.history.branch import train_branch
from streamrl.history.branch_fold import parents_cut
from streamrl.history.compare import compare, compare_runs, print_comparison, write_comparison
from streamrl.history.differences import config_differences
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import Range, differing_choices
from streamrl.history.replay_log import PastLedger
from streamrl.history.source import Origin, evaluations_in, open_source
from streamrl.schemas.codec import encode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import Choices, LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.telemetry.names import PARENT_DISTANCE
from tests.support.errors import raises
from tests.support.ledgers import entry
from tests.support.printed import printed
from tests.support.recorded_run import Recorded

pytestmark = pytest.mark.whole
CHANGED = "trainer.optimizer.learning_rate=0.05"


async def test_a_run_and_its_branch(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_source(str(recorded.path)) as source:
        source = replace(source, run=recorded.run)  # it has the trainer's log-probs beside what was recorded
        run, _ = await train_branch(source, overrides=[CHANGED], name="fast", base=tmp_path, span=Range())
    report = await compare_runs(str(recorded.path), run.name, base=tmp_path)
    warmup = sum(e.source == "warmup" for e in recorded.ledger)
    assert (report.same_batches_to, report.same_digests_to) == (len(recorded.ledger), warmup)
    assert (report.a.batches, report.b.batches) == (len(recorded.ledger) - warmup,) * 2
    assert report.a.curves["rollout/raw_reward"] == report.b.curves["rollout/raw_reward"], "the rewards are in the recording"
    assert report.a.curves["train/grad_norm"].numbers == tuple(range(warmup + 1, len(recorded.ledger) + 1))
    by_title = {row[0]: row[1:] for row in report.table}
    first, last = by_title["recorded reward"][2:4]
    assert (by_title["reward"], by_title["recorded reward"][:2]) == ((first, last, "-", "-", "-"), ("-", "-")), "they are its parent's"
    assert by_title["tis"][-1] != "0", "other parameters weigh the same samples otherwise"
    assert (report.a.origin, report.b.origin) == (None, Origin(parent="parent", version="0.0", overrides=(CHANGED,)))
    apart = report.b.curves[PARENT_DISTANCE]
    assert apart.values and all((value > 0) == (number > warmup + 1) for number, value in zip(apart.numbers, apart.values, strict=True))
    assert not report.a.curves[PARENT_DISTANCE].values and by_title["distance to the parent"][-1] == "-"
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


def test_schedules_of_the_same_length_and_choices_of_a_parent() -> None:
    config = Config(run=RunConfig(steps=40), data=DataConfig(train="x"))
    assert config_differences(config, override(config, ["trainer.optimizer.decay_steps=40"])) == ()
    [other] = config_differences(config, override(config, ["trainer.optimizer.decay_steps=50"]))
    assert (other.key, other.a, other.b) == ("trainer.optimizer.decay_steps", 40, 50)
    beside = chosen(PACKED, micro_tokens=8192)
    fold: Any = SimpleNamespace(beside=beside)
    parent, other = (Config(trainer=TrainerConfig(micro_tokens=n)) for n in (16_384, 4096))
    assert parents_cut(fold, parent, parent)(None) == Cut(8192, PACKED)
    assert parents_cut(fold, other, parent)(None) == Cut(0, None)
    own = chosen(None, micro_tokens=4096)
    assert parents_cut(fold, other, parent)(own) == recorded_cut(own) == Cut(4096, Choices())


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
    assert (rows["eval sums"], rows["eval sums pass@8"]) == (("0.25", "0.5", "0.25", "0.25", "-0.25"), ("", "0.75", "", "0.5", "-0.25"))
    assert rows["eval words"] == ("-", "-", "-", "-", "-")


PACKED = Choices(attention="packed", compiled=True, kept_layers=4, row_length=8192)


def chosen(choices: Choices | None, **more: Any) -> LedgerEntry:
    return entry(**({} if choices is None else {"choices": choices}), **more)


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
    found = differing_choices(ours, chosen(past))
    assert (said in found) if said else found == ""


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
    assert "--trust-code" in printed(capsys, *command, code=1).err
    assert not mark.exists()
    main([*command, "--trust-code"])
    assert mark.exists()


CONFIG = FoldConfig(batch_tasks=2, max_staleness=4, drop_zero_variance=False)


def group(task: int, first_s: float, time_s: float) -> Arrival:
    """A task of one rollout, sampled from `first_s` to `time_s`."""
    view = RolloutView(rollout=0, num_samples=1, num_tokens=4, oldest=0, newest=0, reward=1.0, highest=0)
    return Arrival(Rollouts(task + 1, "main", task, 1, (view,)), time_s, task, first_s, time_s)


def history(*arrivals: Arrival, step_s: float = 1.0, granted: int = 100) -> History:
    return History(
        arrivals=arrivals,
        began_s=0.0,
        granted_s=((granted, 0.0),),
        busy_s=(step_s,),
        batch_tasks=2,
        lag_s=0.0,
        warmup_batches=0,
        warmup_end=0,
    )


def steady(length: float, tasks: int = 8) -> History:
    """Two tasks a second, each sampled for `length` seconds; steps take one."""
    return history(*(group(n, max(0.001, 1.0 + n // 2 - length), 1.0 + n // 2) for n in range(tasks)))


def test_ages_are_what_was_served_when_a_task_began() -> None:
    found = backtest(steady(0.0), CONFIG)
    assert found.batches == 4
    # Batch k closes at second k + 1, when k versions have been made and the newest of them was served to it.
    assert (found.staleness_mean, found.staleness_max) == (0.0, 0)
    assert found.wait_s == pytest.approx(1.0) and found.total_s == pytest.approx(5.0) and found.waste == 0.0
    found = backtest(steady(2.0), CONFIG)
    # A task that ends at second s began at s - 2; version k is served from second k + 1 on: ages 0, 1, 2, 2.
    assert (found.staleness_mean, found.staleness_max) == (pytest.approx((0 + 1 + 2 + 2) / 4), 2)


def test_a_task_that_expires_gives_its_credit_to_others_and_what_comes_for_it_is_waste() -> None:
    late = group(1, 0.5, 9.0)
    others = [group(n, 0.5 + n // 2, 1.0 + n // 2) for n in range(10) if n != 1]
    found = {
        expire: backtest(history(*others, late), replace(CONFIG, max_staleness=1, batch_tasks=1, expire_versions=expire))
        for expire in (0, 2)
    }
    assert {expire: (one.stale_rollouts, one.batches) for expire, one in found.items()} == {0: (1, 9), 2: (1, 9)}
    assert found[2].total_s < found[0].total_s, "without it every other task waits for the one credit that is left"


def test_a_bound_drops_what_a_looser_one_trains_and_waiting_wastes_nothing() -> None:
    slow = [group(0, 0.5, 6.0), group(1, 0.5, 6.0)]
    quick = [group(n, 0.9 + (n - 2) // 2, 1.0 + (n - 2) // 2) for n in range(2, 10)]
    recorded = history(*sorted([*slow, *quick], key=lambda arrival: arrival.time_s))
    loose = backtest(recorded, replace(CONFIG, max_staleness=8))
    assert (loose.batches, loose.staleness_max, loose.stale_rollouts) == (5, 4, 0)
    tight = backtest(recorded, replace(CONFIG, max_staleness=3))
    assert (tight.batches, tight.stale_rollouts) == (4, 2)
    assert tight.waste == pytest.approx(2 / 10) and tight.staleness_max <= 3
    slow = [group(0, 0.5, 9.0), group(1, 0.5, 9.0)]
    quick = [group(n, 0.9 + (n - 2) // 2, 1.0 + (n - 2) // 2) for n in range(2, 10)]
    recorded = history(*sorted([*slow, *quick], key=lambda arrival: arrival.time_s))
    drop, wait = (backtest(recorded, replace(CONFIG, max_staleness=1, stale=policy)) for policy in ("drop", "wait"))
    assert drop.stale_rollouts == 2 and wait.stale_rollouts == 0
    assert wait.batches == 5 and drop.batches == 4 and wait.wait_s > drop.wait_s


def test_a_task_comes_later_where_its_credit_does() -> None:
    """Bound 0 grants two tasks a version: the next two cannot have begun before the first two were trained."""
    burst = history(*(group(n, 0.5, 1.0) for n in range(8)))
    free, lockstep = backtest(burst, CONFIG), backtest(burst, replace(CONFIG, max_staleness=0))
    assert free.batches == lockstep.batches == 4 and free.staleness_max == 3 and lockstep.staleness_max == 0
    # A pair takes half a second from its grant on, then a second of training.
    assert (free.total_s, free.wait_s) == (pytest.approx(5.0), pytest.approx(1.0))
    assert (lockstep.total_s, lockstep.wait_s) == (pytest.approx(1.0 + 1.0 + 3 * 1.5), pytest.approx(1.0 + 3 * 0.5))


async def test_engines_that_lag_on_purpose_are_not_modelled(recorded: Recorded) -> None:
    with raises(ConfigError, key="debug.delay_versions"):
        backtest(steady(0.0), replace(CONFIG, delay_versions=2))
    async with open_source(str(recorded.path)) as source:
        lagging = replace(source, config=replace(source.config, debug=replace(source.config.debug, delay_versions=1)))
        with raises(ConfigError, key="debug.delay_versions"):
            await backtest_grid(lagging, ["tasks.max_staleness=2"])


async def test_the_recorded_policy_gives_about_what_was_recorded(recorded: Recorded) -> None:
    log = RecordedLog(recorded.path)
    own = fold_config(recorded.config)
    history = await read_history(log, PastLedger(recorded.ledger), own)
    # Everything that the trainer had read by its last batch, and what came up to that moment.
    assert recorded.ledger[-1].cursor <= len(history.arrivals) <= len(recorded.messages)
    assert all(arrival.time_s <= recorded.ledger[-1].time_s for arrival in history.arrivals[recorded.ledger[-1].cursor :])
    found = backtest(history, own)
    main = [e for e in recorded.ledger if e.source == "main"]
    assert abs(found.batches - len(recorded.ledger)) <= 2
    ages = [age for e in main for age in e.staleness]
    assert abs(found.staleness_mean - sum(ages) / len(ages)) < 0.5
    assert found.staleness_max <= own.max_staleness


async def test_the_grid_of_a_run(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_source(str(recorded.path)) as source:
        report = await backtest_grid(source, ["tasks.max_staleness=0,2,6", "tasks.stale=drop,wait"])
        with raises(ConfigError, key="loss.clip_low"):
            await backtest_grid(source, ["loss.clip_low=0.1"])
        usual = await backtest_grid(source, [])
    assert [(o.max_staleness, o.stale) for o in report.outcomes] == [(s, p) for s in (0, 2, 6) for p in ("drop", "wait")]
    assert all(o.staleness_max <= o.max_staleness for o in report.outcomes if o.stale == "drop")
    assert len(usual.outcomes) == 4 * 3
    print_backtest(report)
    out = capsys.readouterr().out
    assert "the run's" in out and "policy" in out and "…" not in out
