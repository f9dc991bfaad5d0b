"""A run with a critic and a reference, through the real loop: its log gives it again, and a branch goes on from its checkpoints."""

import asyncio
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.errors import ConfigError
from streamrl.history.branch import read_branch_ledger
from streamrl.history.branch_run import train_branch
from streamrl.history.replay import Range
from streamrl.history.source import open_source
from streamrl.schemas.ledger import LedgerEntry
from tests.history.test_verify import edited_entries, replayed
from tests.support.errors import raises
from tests.support.recorded_run import Recorded, make_recorded
from tests.support.torch_runs import ppo_config


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    base = tmp_path_factory.mktemp("ppo")
    return asyncio.run(make_recorded(base, ppo_config(base)))


async def test_its_log_gives_policy_and_critic_again(learned: Recorded) -> None:
    norms = [entry.metrics["train/value_norm"] for entry in learned.ledger]
    assert len(norms) == len(set(norms)) == 6
    assert learned.ledger[0].metrics["train/lr"] == 0.0
    assert learned.ledger[1].metrics["train/lr"] > 0.0
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
    assert report.equal == 5
    assert report.first_difference is not None
    assert report.first_difference.version == "0.3"
    assert "critic" in report.first_difference.what


async def branched(learned: Recorded, base: Path, *overrides: str, span: Range | None = None) -> list[LedgerEntry]:
    async with open_source(str(learned.path)) as source:
        run, _ = await train_branch(source, overrides=overrides, name=None, base=base, span=span or Range())
    return read_branch_ledger(run.path)


@pytest.mark.usefixtures("unplotted")
async def test_branches_change_the_loss_on_the_same_batches(learned: Recorded, tmp_path: Path) -> None:
    same = await branched(learned, tmp_path, "loss.correction.high=2.0", span=Range(first=2))
    assert [e.digest for e in same] == [e.digest for e in learned.ledger[2:]]
    other = await branched(learned, tmp_path, "loss.correction.high=0.5", span=Range(first=2))
    assert [e.used for e in other] == [e.used for e in learned.ledger[2:]]
    assert not {e.digest for e in other} & {e.digest for e in learned.ledger[2:]}
    plain = await branched(
        learned, tmp_path, "loss.advantage=reinforce_plus_plus", "loss.gae_lambda=1", "loss.critic={learning_rate=1e-5, only_steps=0}"
    )
    assert [e.used for e in plain] == [e.used for e in learned.ledger]
    assert "train/value_norm" not in plain[0].metrics


def test_models_that_are_gone_are_named(learned: Recorded, tmp_path: Path) -> None:
    with raises(ConfigError, key="loss.kl.reference", path=f"{tmp_path}/gone"):
        asyncio.run(branched(learned, tmp_path, f"loss.kl.reference={tmp_path}/gone"))
    assert list(tmp_path.iterdir()) == []
