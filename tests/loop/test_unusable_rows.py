"""A real run over rows of which some cannot be used: their tasks end with the reason, credits come back, a replay decides alike."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from tests.support.digits import TABLE, write_digits
from tests.support.programs import STREAMRL, Start, said

pytestmark = pytest.mark.nats


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    bad = ["{\n", "\n", json.dumps({"prompt": "1" * 300, "label": "2"}) + "\n", '{"prompt": "11"}\n']
    (tmp_path / "train.jsonl").write_text("".join(rows[:40] + bad + rows[40:]))
    return tmp_path


async def test_tasks_of_rows_that_cannot_be_used_end_with_the_reason(start: Start, place: Path) -> None:
    streamrl = partial(start, *STREAMRL)
    async with asyncio.timeout(240):
        code, out, err = await said(await streamrl("up", "run.toml", "--plain"))
        assert code == 0, out + err
        assert "data.train: 3 of the first 93 rows cannot be used" in out
        log = (place / "runs" / "digits" / "logs" / "feeder-0.log").read_text()
        assert "event=row_broken" in log and "line 41, got: Input data was truncated" in log and "expected a label under 'label'" in log
        assert "event=row_too_long" in log and "line 43, got 300" in log
        code, out, err = await said(await streamrl("replay", "digits", "--verify"))
        assert code == 0, out + err
        code, out, err = await said(await streamrl("up", "run.toml", "--plain", "--set", "run.steps=18"))
        assert code == 0, out + err
        with (place / "train.jsonl").open("a") as file:
            file.write('{"prompt": "11", "label": "4"}\n')
        code, out, err = await said(await streamrl("up", "run.toml", "--plain", "--set", "run.steps=20"))
        assert code == 1 and "dataset changed on resume" in err and "hint: put the old rows back" in err


SOURCES = """
[[data.sources]]
name = "low"
train = "train.jsonl@[:40]"
weight = [[0, 1], [3, 4]]
[[data.sources]]
name = "high"
train = "train.jsonl@[40:]"
"""


async def test_a_run_with_several_sources_is_resumed_and_replayed(start: Start, place: Path) -> None:
    (place / "run.toml").write_text(TABLE.replace('train = "train.jsonl"\n', "").replace("steps = 15", "steps = 6") + SOURCES)
    streamrl = partial(start, *STREAMRL)
    async with asyncio.timeout(240):
        for steps in (6, 9):
            code, out, err = await said(await streamrl("up", "run.toml", "--plain", "--set", f"run.steps={steps}"))
            assert code == 0, out + err
        log = (place / "runs" / "digits" / "logs" / "feeder-0.log").read_text()
        assert log.count("event=mixture") >= 1 and "weights=(4.0, 1.0)" in log
        assert "source high: 3 of the first 53 rows cannot be used" in out
        code, out, err = await said(await streamrl("replay", "digits", "--verify"))
        assert code == 0, out + err
        code, out, err = await said(await streamrl("record", "digits", "--out", "recording"))
        assert code == 0, out + err
        for body in pq.read_table(place / "recording" / "ledger.parquet")["body"].to_pylist():
            entry = decode(body, LedgerEntry)
            assert entry.sources and sum(tally.groups for tally in entry.sources.values()) == len(entry.used)
            assert set(entry.sources) <= {"low", "high"}
        (place / "run.toml").write_text((place / "run.toml").read_text().replace("[3, 4]", "[3, 5]"))
        code, out, err = await said(await streamrl("up", "run.toml", "--plain", "--set", "run.steps=12"))
        assert code == 1 and "data.sources changed on resume" in err
