"""A user's curriculum: what it is asked, that its verdict is on record before it is used, and that whatever it does the weights stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.load import convert
from streamrl.config.tree import Config
from streamrl.data.mixed import MixedRows
from streamrl.errors import ConfigError
from streamrl.producers.curriculum import Curriculum, call, checked, statistics
from streamrl.producers.mixture import settled
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Grant
from streamrl.schemas.ledger import LedgerEntry, SourceTally
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.producing import in_memory

CODE = """
import os, sys, time

def by_reward(version, sources):
    print("not an answer")
    return {name: 1 + (one["reward"] or 0) * version for name, one in sources.items()}

def fails(version, sources):
    raise ValueError("no idea")

def hangs(version, sources):
    time.sleep(600)

def leaves(version, sources):
    os._exit(3)

def quits(version, sources):
    sys.exit("enough")

def talks(version, sources):
    os.write(2, b"x" * 100000)
    return {"a": float("nan"), "b": 1}

def large(version, sources):
    return {"x" * (2 << 20): 1}

def one(version):
    return {}
"""


@pytest.fixture
def config(tmp_path: Path, run_id: str) -> Config:
    (tmp_path / "mine.py").write_text(CODE)
    sources = [{"name": "a", "train": "a", "weight": 3}, {"name": "b", "train": "b"}]
    data = {"sources": sources, "curriculum": f"{tmp_path}/mine.py:by_reward", "curriculum_every": 2}
    return convert({"run": {"name": run_id}, "data": data}, where="test")


def entry(number: int, **sources: SourceTally) -> LedgerEntry:
    kept = {"run": "r", "trainer": "main", "source": "main", "used": (), "cursor": 1, "granted": 1, "retired": 1}
    return LedgerEntry(version=Version(0, number), sources=sources, **kept)  # type: ignore[arg-type]


def test_statistics_are_weighted_by_groups() -> None:
    entries = [entry(1, a=SourceTally(3, 1.0), b=SourceTally(1)), entry(2, a=SourceTally(1, 0.0), other=SourceTally(9, 1.0))]
    assert statistics(entries, {"a": 3.0, "b": 1.0, "c": 2.0}) == {
        "a": {"weight": 3.0, "groups": 4, "reward": 0.75},
        "b": {"weight": 1.0, "groups": 1, "reward": None},
        "c": {"weight": 2.0, "groups": 0, "reward": None},
    }


SAID = (None, 3, [], {}, {"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": -1, "b": 1}, {"a": 0, "b": 0}, {"a": None, "b": 1})
WEIGHTS = (float("nan"), float("inf"), "1", True)


@pytest.mark.parametrize("said", [*SAID, *({"a": one, "b": 1} for one in WEIGHTS)], ids=repr)
def test_what_are_no_weights_is_refused(said: object) -> None:
    with raises(ConfigError, key="data.curriculum"):
        checked(said, ["a", "b"])


@pytest.mark.process
@in_memory
async def test_a_verdict_is_on_record_before_it_is_used_and_a_restart_goes_on_with_it(bus: Bus, config: Config) -> None:
    subjects, rows = Subjects(config.run.name), MixedRows(("a", "b"), ())
    for number in range(1, 5):
        body = encode(entry(number, a=SourceTally(1, 0.0), b=SourceTally(1, 0.5 if number > 2 else 0.0)))
        await bus.publish(subjects.ledger("main"), body, id=str(number))
    curriculum = Curriculum(bus, subjects, config)
    first = await settled(bus, rows, config, Grant(16, 0, 0), curriculum.weights)
    assert [one.weights for one in first.segments] == [(3.0, 1.0)]
    async with asyncio.timeout(60):
        while len((found := await settled(bus, rows, config, Grant(32, 4, 16), curriculum.weights)).segments) == 1:
            await asyncio.sleep(0.05)
    assert [(one.first, one.version, one.weights) for one in found.segments] == [(0, 0, (3.0, 1.0)), (32, 4, (1.0, 3.0))]
    again = Curriculum(bus, subjects, config)
    assert (await settled(bus, rows, config, Grant(40, 5, 24), again.weights)).segments == found.segments
    assert not curriculum.error


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "ValueError: no idea (mine.py line 9)"),
        ("hangs", "no answer within"),
        ("leaves", "ended without"),
        ("quits", "ended without"),
        ("large", "ended without"),
        ("one", "curriculum"),
        ("none", "none"),
    ],
)
async def test_whatever_it_does_is_said_and_ends_nothing(config: Config, name: str, said: str) -> None:
    mine = convert({"data": {"curriculum": config.data.curriculum.replace("by_reward", name)}}, where="test")
    with raises(ConfigError, key="data.curriculum") as caught:
        await call(mine, {"version": 1, "sources": {}}, 3.0 if name == "hangs" else 60.0)
    assert said in caught.value.message


@pytest.mark.process
@in_memory
async def test_weights_stay_where_it_fails(bus: Bus, config: Config) -> None:
    data = {"sources": [{"name": "a", "train": "a"}, {"name": "b", "train": "b"}], "curriculum_every": 1}
    mine = convert({"data": data | {"curriculum": config.data.curriculum.replace("by_reward", "talks")}}, where="test")
    curriculum, rows = Curriculum(bus, Subjects(config.run.name), mine), MixedRows(("a", "b"), ())
    await settled(bus, rows, mine, Grant(16, 0, 0), curriculum.weights)
    async with asyncio.timeout(60):
        while not curriculum.error:
            assert len((await settled(bus, rows, mine, Grant(32, 4, 16), curriculum.weights)).segments) == 1
            await asyncio.sleep(0.05)
    assert "at version 4" in curriculum.error and "'a': 'nan'" in curriculum.error
    await curriculum.close()
