"""Branches of a run of the table, and of one with a critic and a reference, whose log gives it again."""

import asyncio
import hashlib
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, DataConfig, OptimizerConfig, RunConfig, TrainerConfig, schedule_steps
from streamrl.errors import ConfigError
from streamrl.history.branch import changed_config, train_branch
from streamrl.history.branch_file import BranchFile, read_branch_ledger
from streamrl.history.replay import Range
from streamrl.history.source import open_source, read_entries
from streamrl.models.directories import list_checkpoints
from streamrl.monitor.runs import describe, list_runs
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.ledger import LedgerEntry
from tests.history.test_verify import edited_entries, replayed
from tests.support.errors import raises
from tests.support.recorded_run import Recorded, make_recorded
from tests.support.torch_runs import ppo_config

pytestmark = [pytest.mark.usefixtures("unplotted"), pytest.mark.whole]


def contents(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.rglob("*")) if p.is_file()}


async def branched(recorded: Recorded, base: Path, *overrides: str, span: Range | None = None) -> tuple[RunDir, list[LedgerEntry]]:
    before = contents(recorded.path)
    async with open_source(str(recorded.path)) as source:
        run, _ = await train_branch(source, overrides=overrides, name=None, base=base, span=span or Range())
    assert contents(recorded.path) == before, "a branch never writes to its parent"
    return run, read_branch_ledger(run.path)


def batches(entries: list[LedgerEntry]) -> list[object]:
    return [entry.used for entry in entries]


async def test_another_rate_trains_the_parents_batches(recorded: Recorded, tmp_path: Path) -> None:
    run, entries = await branched(recorded, tmp_path, "trainer.optimizer.learning_rate=0.01")
    assert batches(entries) == batches(recorded.ledger)
    assert [e.warm for e in entries] == [e.warm for e in recorded.ledger]
    assert [e.staleness for e in entries] == [e.staleness for e in recorded.ledger]
    assert [e.drops for e in entries] == [e.drops for e in recorded.ledger]
    assert [e.granted for e in entries] == [e.granted for e in recorded.ledger], "its credits are its parent's"
    warmup = sum(e.source == "warmup" for e in recorded.ledger)
    same = [a.digest == b.digest for a, b in zip(entries, recorded.ledger, strict=True)]
    assert all(same[:warmup]) and not any(same[warmup:]), "the rate of the warm-up is another one"
    note = msgspec.json.decode((run.path / BRANCH_FILE).read_bytes(), type=BranchFile)
    assert (note.parent, note.parent_version, note.same_batches) == ("parent", "0.0", True)
    assert run.summary_path.exists() and run.plot_path.exists() and len(list(run.hf.iterdir())) == 1
    assert [(line.run, line.state, line.parent) for line in list_runs(tmp_path)] == [("parent-branch-1", "finished", "parent")]


async def test_a_branch_is_up_until_it_ends(recorded: Recorded, tmp_path: Path) -> None:
    async with open_source(str(recorded.path)) as source:
        training = asyncio.create_task(train_branch(source, overrides=("loss.clip_low=0.2",), name="mine", base=tmp_path, span=Range()))
        await asyncio.wait({training}, timeout=0)  # it has come to its training thread
        line = describe(RunDir(tmp_path / "mine"))
        assert (line.state, line.supervisor) == ("running", os.getpid())
        run, _ = await training
    assert describe(run).supervisor is None


async def test_branches_that_change_nothing_or_keep_groups_differ_in_that_alone(recorded: Recorded, tmp_path: Path) -> None:
    _, entries = await branched(recorded, tmp_path, "tasks.max_staleness=2", "loss.clip_low=0.2")
    assert [e.digest for e in entries] == [e.digest for e in recorded.ledger]
    _, entries = await branched(recorded, tmp_path, "tasks.drop_zero_variance=false")
    assert not any(d.reason == "zero_variance" for e in entries for d in e.drops)
    assert any(d.reason == "zero_variance" for e in recorded.ledger for d in e.drops), "the parent must have dropped some"
    used = {g.task for e in recorded.ledger for g in e.used}
    assert {g.task for e in entries for g in e.used} - used


async def test_a_branch_at_a_version_goes_on_from_there(recorded: Recorded, tmp_path: Path) -> None:
    run, entries = await branched(recorded, tmp_path, "loss.correction.high=2.0", span=Range(first=11, last=16))
    began = max(v.number for v, _ in list_checkpoints(recorded.path / "checkpoints", "main-") if v.number <= 11)
    assert began > 0
    assert [e.digest for e in entries] == [e.digest for e in recorded.ledger[began:16]]
    assert msgspec.json.decode((run.path / BRANCH_FILE).read_bytes(), type=BranchFile).parent_version == f"0.{began}"
    second, changed = await branched(recorded, tmp_path, "loss.correction.high=0.5", span=Range(first=11, last=16))
    assert second.name == "parent-branch-2"
    assert batches(changed) == batches(entries)


@pytest.mark.parametrize("overrides", [("tasks.max_staleness=0",), ("tasks.batch_tasks=2",), ("tasks.batch_tasks=5", "tasks.stale=wait")])
async def test_other_batches_close_by_their_own_rules(recorded: Recorded, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    _, entries = await branched(recorded, tmp_path / "a", *overrides)
    assert batches(entries) != batches(recorded.ledger)
    main = [e for e in entries if e.source == "main"]
    size = next((int(o.partition("=")[2]) for o in overrides if "batch_tasks" in o), 3)
    assert main and all(len(e.used) == size for e in main)
    tasks = [group.task for e in entries for group in e.used]
    assert len(tasks) == len(set(tasks)), "no task is trained twice"
    groups = sum(len(e.used) for e in recorded.ledger)
    assert sum(len(e.used) for e in entries) <= groups, "it does not run ahead of its parent"
    bound = 0 if "tasks.max_staleness=0" in overrides else 2
    if "tasks.stale=wait" not in overrides:
        assert all(0 <= age <= bound for e in entries for age in e.staleness)
    numbers = [e.version.number for e in entries]
    assert numbers == list(range(1, len(entries) + 1))
    if bound == 0:
        _, again = await branched(recorded, tmp_path / "b", *overrides)
        assert [e.digest for e in again] == [e.digest for e in entries], "no clock has a part in it"


async def test_what_has_no_part_in_it_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    for text in ("sampling.temperature=0.5", "model.hidden=64", "run.seed=4", "engine.slots=3"):
        with pytest.raises(ConfigError, match=text.partition("=")[0]):
            await branched(recorded, tmp_path, text)
    assert contents(tmp_path) == {}
    run, entries = await branched(recorded, tmp_path, "loss.clip_low=0.1", span=Range(last=4))
    with pytest.raises(ConfigError, match="stream of its own"):
        async with open_source(run.name, base=tmp_path):
            pass
    assert (await read_entries(run.name, base=tmp_path)) == (run.name, entries)
    async with open_source(str(recorded.path)) as source:
        with pytest.raises(ConfigError, match="no run has"):
            await train_branch(source, overrides=["loss.clip_low=0.1"], name=run.name, base=tmp_path, span=Range())


def test_the_steps_of_a_branch_are_the_length_of_its_schedule() -> None:
    def length(*overrides: str) -> int:
        parent = Config(
            run=RunConfig(steps=40), data=DataConfig(train="x"), trainer=TrainerConfig(optimizer=OptimizerConfig(decay_steps=30))
        )
        return schedule_steps(changed_config(parent, overrides))

    assert length("trainer.optimizer.learning_rate=1") == 30
    assert length("run.steps=70") == 70
    assert length("run.steps=70", "trainer.optimizer.decay_steps=50") == 50
    with raises(ConfigError, key="run.seed"):
        changed_config(Config(data=DataConfig(train="x")), ["run.seed=1"])


@pytest.mark.parametrize(("recorded", "wanted"), [("grpo", "remax"), ("remax", "rloo")])
def test_recorded_tasks_have_greedy_rollouts_or_have_none(recorded: str, wanted: str) -> None:
    parent = Config(data=DataConfig(train="x"), loss=LossConfig(advantage=recorded))
    with raises(ConfigError, key="loss.advantage"):
        changed_config(parent, [f"loss.advantage={wanted}"])
    assert changed_config(parent, ["loss.clip_low=0.1"]).group_size == parent.group_size


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run with a critic and a reference."""
    base = tmp_path_factory.mktemp("ppo")
    return asyncio.run(make_recorded(base, ppo_config(base)))


async def test_its_log_gives_policy_and_critic_again(learned: Recorded) -> None:
    norms = [entry.metrics["train/value_norm"] for entry in learned.ledger]
    assert len(norms) == len(set(norms)) == 6
    assert learned.ledger[0].metrics["train/lr"] == 0.0 and learned.ledger[1].metrics["train/lr"] > 0.0
    report = await replayed(learned.path)
    assert (report.versions, report.equal, report.first_difference) == (6, 6, None)
    report = await replayed(learned.path, Range(first=4))
    # The checkpoint of 4 is left out where that of 2 was still being written.
    assert report.began in ("0.2", "0.4")
    assert report.equal == report.versions > 0, "the critic's checkpoint belongs to it"


async def test_another_critic_is_told(learned: Recorded, tmp_path: Path) -> None:
    path = Path(shutil.copytree(learned.path, tmp_path / "copy"))

    def moved(entry: LedgerEntry) -> LedgerEntry:
        shift = 1e-9 if entry.version.number == 3 else 0.0
        return replace(entry, metrics=entry.metrics | {"train/value_norm": entry.metrics["train/value_norm"] + shift})

    edited_entries(path, moved)
    report = await replayed(path)
    assert report.equal == 5 and report.first_difference is not None and report.first_difference.version == "0.3"
    assert "critic" in report.first_difference.what


async def test_branches_change_the_loss_on_the_same_batches(learned: Recorded, tmp_path: Path) -> None:
    _, same = await branched(learned, tmp_path, "loss.correction.high=2.0", span=Range(first=2))
    assert [e.digest for e in same] == [e.digest for e in learned.ledger[2:]]
    _, other = await branched(learned, tmp_path, "loss.correction.high=0.5", span=Range(first=2))
    assert [e.used for e in other] == [e.used for e in learned.ledger[2:]]
    assert not {e.digest for e in other} & {e.digest for e in learned.ledger[2:]}
    _, plain = await branched(
        learned, tmp_path, "loss.advantage=reinforce_plus_plus", "loss.gae_lambda=1", "loss.critic={learning_rate=1e-5, only_steps=0}"
    )
    assert [e.used for e in plain] == [e.used for e in learned.ledger]
    assert "train/value_norm" not in plain[0].metrics


def test_models_that_are_gone_are_named(learned: Recorded, tmp_path: Path) -> None:
    with raises(ConfigError, key="loss.kl.reference", path=f"{tmp_path}/gone"):
        asyncio.run(branched(learned, tmp_path, f"loss.kl.reference={tmp_path}/gone"))
    assert list(tmp_path.iterdir()) == []
