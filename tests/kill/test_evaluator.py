"""The evaluator is ended before and after it stores an answer and before and after it tells a result: nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.server import NatsServer
from streamrl.config.evaluation import EvaluationSetConfig
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event
from streamrl.schemas.subjects import EVENTS
from streamrl.schemas.tasks import Sampling
from tests.kill.test_producers import finished
from tests.support.audit.evaluations import problems_of
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, table_config, world

SPOTS = [
    Spot("store", "before", 1),
    Spot("store", "after", 1),
    Spot("store", "after", 4),
    Spot("publish events", "before", 1),
    Spot("publish events", "after", 1),
    Spot("store", "before", 3),
    Spot("publish events", "before", 1),
]
ROWS = {"sums": 9, "few": 6}


async def told(w: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last = (await w.bus.last(w.subjects.events("evaluation"))) if w.bus else None
    if last is None:
        return found
    async for message in w.bus.read(EVENTS, after=0, subject=w.subjects.events("evaluation")):
        found.append(decode(message.body, Event).detail)
        if message.sequence >= last.sequence:
            break
    return found


@pytest.mark.nats
async def test_every_answer_and_every_result(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(9)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "heldout.jsonl")
    sets = (EvaluationSetConfig(name="sums", path=path, n=2), EvaluationSetConfig(name="few", path=f"{path}@[0:6]"))
    config = table_config(tmp_path, run={"steps": 3}, evaluation={"sets": sets, "sampling": Sampling(temperature=1.0, max_new_tokens=5)})
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer", "feeder", "producer"):
            async with asyncio.timeout(60):
                await finished(w)
            await w.kill("evaluator", SPOTS)
            async with asyncio.timeout(60):
                assert await w.child("evaluator") == 0
        found = await told(w)
        assert [(one["set"], one["final"]) for one in found] == [("sums", False), ("few", True)]
        # Of the first set the last death but two has left all answers, of the second two.
        assert found[1]["resumed"] >= 2
        folder = w.run.path / "evaluations"
        assert problems_of(found, folder, rows=ROWS) == []
        assert found[0]["failed"] == 2, "one task in nine is given no reward"

        # The audit is one that can fail.
        store = folder / found[0]["version"] / "sums.jsonl"
        lines = store.read_text().splitlines(keepends=True)
        store.write_text("".join([*lines, lines[1]]))
        assert any("stored 2 times" in problem for problem in problems_of(found, folder, rows=ROWS))
        store.write_text("".join(lines[:-1]))
        assert any("expected each of 9 problems" in problem for problem in problems_of(found, folder, rows=ROWS))
        store.write_text("".join(lines))
        wrong = copy.deepcopy(found)
        wrong[0]["accuracy"] += 0.01
        assert any("expected a mean of" in problem for problem in problems_of([*wrong, found[1]], folder, rows=ROWS))
