"""A run in which rollouts hang for ever: their tasks expire, the run goes on, and its log decides alike when it is read again."""

from pathlib import Path

import pytest

from streamrl.core.fold_config import fold_config
from streamrl.history.backtest_model import read_history
from streamrl.history.branch import read_branch_ledger
from streamrl.history.branch_run import train_branch
from streamrl.history.replay import Range, verify
from streamrl.history.replay_log import read_past
from streamrl.history.source import open_source
from streamrl.schemas.subjects import Subjects
from tests.support.recorded_run import FIXED, make_recorded
from tests.support.world.world import table_config

PRODUCER = """
import asyncio

async def hangs(task, engine):
    if task.index % 9 == 4:
        await asyncio.sleep(3600)
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""
STEPS = 14
EXPIRE = 3


@pytest.mark.process
@pytest.mark.parametrize("stale", ["drop", pytest.param("mask", marks=pytest.mark.slow)])
async def test_hung_rollouts_expire_and_replay_branch_and_back_test_agree(tmp_path: Path, stale: str) -> None:
    (tmp_path / "hangs.py").write_text(PRODUCER)
    config = table_config(
        tmp_path,
        run={"name": "hung", "steps": STEPS},
        tasks={"stale": stale, "expire_versions": EXPIRE},
        producer={"function": f"{tmp_path / 'hangs.py'}:hangs", "concurrency": 12, "children": 1},
        **FIXED,
    )
    recorded = await make_recorded(tmp_path, config)
    assert len(recorded.ledger) == STEPS
    ends = {drop.task: (entry.version.number, drop.reason) for entry in recorded.ledger for drop in entry.drops if drop.retires}
    hung = [task for task in range(recorded.ledger[-1].granted) if task % 9 == 4]
    expired = [task for task, (_, reason) in ends.items() if reason == "expired"]
    assert len(expired) >= 3 and set(expired) <= set(hung)
    assert ends[4] == (EXPIRE + 1, "expired"), "granted at version 0, so its drop is in the entry after version 3"
    async with open_source(str(recorded.path)) as source:
        report = await verify(source.config, source.log, source.model_dir)
        assert report.ok and report.versions == STEPS, report.lines
        past = await read_past(source.log, Subjects("hung"), "main")
        history = await read_history(source.log, past, fold_config(source.config))
        assert recorded.ledger[-1].granted in [granted for granted, _ in history.granted_s]
        branch, _ = await train_branch(source, overrides=["loss.clip_low=0.1"], name=None, base=tmp_path / "b", span=Range())
    entries = read_branch_ledger(branch.path)
    assert [(e.used, e.drops, e.granted) for e in entries] == [(e.used, e.drops, e.granted) for e in recorded.ledger]
