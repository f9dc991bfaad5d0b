"""A run over rows of which some cannot be used: their tasks end with the reason, credits come back, a replay decides alike."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.errors import ConfigError
from tests.support.digits import TABLE, write_digits
from tests.support.errors import raises
from tests.support.ups import Ups

pytestmark = pytest.mark.process
SOURCES = """
[[data.sources]]
name = "low"
train = "train.jsonl@[:40]"
weight = [[0, 1], [3, 4]]
[[data.sources]]
name = "high"
train = "train.jsonl@[40:]"
"""


@pytest_asyncio.fixture
async def ups(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ups]:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    write_digits(tmp_path, TABLE)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    bad = ["{\n", "\n", json.dumps({"prompt": "1" * 300, "label": "2"}) + "\n", '{"prompt": "11"}\n']
    (tmp_path / "train.jsonl").write_text("".join(rows[:40] + bad + rows[40:]))
    made = Ups(tmp_path, "warmup.max_steps=2", "tasks.drop_zero_variance=false")
    yield made
    await made.bus.close()


async def test_tasks_of_rows_that_cannot_be_used_end_with_the_reason(ups: Ups, caplog: pytest.LogCaptureFixture) -> None:
    [note] = await ups.up(14)
    assert note.startswith("data.train: 3 of the first 93 ")
    assert "event=row_broken" in caplog.text and "line 41, got: " in caplog.text and "under 'label'" in caplog.text
    assert "event=row_too_long" in caplog.text and "line 43, got 300" in caplog.text
    await ups.up(16)
    report = await ups.replayed()
    assert report.ok and report.equal == len(await ups.ledger()) > 16, report.lines
    reasons = [drop.reason for entry in await ups.ledger() for drop in entry.drops]
    assert reasons.count("row_broken") >= 2 and "row_too_long" in reasons
    with (ups.place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "11", "label": "4"}\n')
    with raises(ConfigError, key="data.train") as caught:
        await ups.up(18)
    assert "old rows" in caught.value.hint


async def test_a_run_with_several_sources_is_resumed_and_replayed(ups: Ups, caplog: pytest.LogCaptureFixture) -> None:
    (ups.place / "run.toml").write_text(TABLE.replace('train = "train.jsonl"\n', "") + SOURCES)
    await ups.up(6)
    [note] = await ups.up(9)
    assert note.startswith("source high: 3 of the first 53 ")
    assert "event=mixture" in caplog.text and "weights=(4.0, 1.0)" in caplog.text
    report = await ups.replayed()
    assert report.ok and report.equal == len(await ups.ledger()) > 9, report.lines
    for entry in await ups.ledger():
        assert entry.sources and sum(tally.groups for tally in entry.sources.values()) == len(entry.used)
        assert set(entry.sources) <= {"low", "high"}
    (ups.place / "run.toml").write_text((ups.place / "run.toml").read_text().replace("[3, 4]", "[3, 5]"))
    with raises(ConfigError, key="data.sources"):
        await ups.up(12)
